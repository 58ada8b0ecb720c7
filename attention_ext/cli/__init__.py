"""The command line: ``python -m attention_ext train | generate | info``.

Reading order: `main` (the commands and their exit codes), `options` (every option, as frozen
dataclasses), `config` (preset < TOML file < flags), then a file for each command. Third-party
libraries are each imported in one module, when a command needs them: tyro in `flags`, tomli_w in
`config`, tqdm in `progress`, matplotlib in `plot`, safetensors in `state`.
"""
