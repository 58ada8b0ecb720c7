"""Flags from dataclasses: the one module that knows tyro.

An option is a field of a frozen dataclass, annotated with `flag`. A field ``batch_size`` becomes
``--batch-size`` beside its further names; the fields of a nested dataclass become a group of the
help text, their names staying flat. tyro draws errors as boxes of several lines; `parse` turns each
into one sentence, and names the nearest option for an unknown one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from .errors import UsageError, unknown

Options = TypeVar("Options")

POSITIONAL: Any = tyro.conf.Positional  # annotates an argument that is found by its place
SWITCH: Any = tyro.conf.FlagCreatePairsOff  # annotates a bool that needs no --no-NAME
_CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
_REWORDED = (
    (r"^Error parsing ", ""),
    (r"^Missing value for argument '(.+?)'.*", r"\1: expected a value"),
    (
        r"^invalid choice '(.*)' for argument '(.+)'\. Expected one of \((.*)\)",
        r"\2: expected one of \3, got '\1'",
    ),
)
_NUMBERS: dict[type, str] = {int: "an integer", float: "a number"}


def flag(*names: str, help: str, metavar: str | None = None) -> Any:
    """Annotates a field: an option ``--field-name``, with further ``names`` such as ``"-t"``."""
    return tyro.conf.arg(
        aliases=names or None, help=help, metavar=metavar, help_behavior_hint=_default_hint
    )


def optional_value(metavar: str) -> Any:
    """Annotates a ``str | None`` further: the option may stand alone, its value is "" then."""

    def join(words: list[str]) -> str:
        if len(words) > 1:
            raise ValueError(f"expected at most one value, got {' '.join(words)!r}")
        return "".join(words)

    return tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs="*",
        metavar=metavar,
        instance_from_str=join,
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [value] if value else [],
    )


def parse(kind: type[Options], arguments: Sequence[str], command: str, default: Options) -> Options:
    """The options that ``arguments`` give, the rest taken from ``default``.

    Args:
        kind: a dataclass whose fields carry :func:`flag`.
        arguments: the words after the command.
        command: its name, for the help text.
        default: an instance of ``kind``; its values are the defaults that ``--help`` shows.

    Raises:
        UsageError: an unknown option, a missing or a wrong value, too many arguments.
        SystemExit: with code 0, after ``--help``.
    """
    names = option_names(kind)
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and names.get(name.replace("_", "-")) is bool:
            raise UsageError(
                f"{name} takes no value, got {value!r}; write {name} or --no-{name.lstrip('-')}"
            )
    with _errors_as_sentences(arguments):
        options, left = tyro.cli(
            kind,
            prog=f"python -m attention_ext {command}",
            args=arguments,
            default=default,
            return_unknown_args=True,
            config=_CONFIG,
            registry=_registry(),
        )
    if left:
        raise _unknown(left, names, f"see python -m attention_ext {command} --help")
    return options


def option_names(kind: type[Any]) -> dict[str, Any]:
    """Every option of a dataclass, nested ones and further names too, with the value's type."""
    names: dict[str, Any] = {}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        base, *notes = (
            get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
        )
        if dataclasses.is_dataclass(base):
            names |= option_names(base)  # type: ignore[arg-type]
            continue
        if POSITIONAL in notes:
            continue
        names[f"--{name.replace('_', '-')}"] = base
        for note in notes:
            names |= dict.fromkeys(getattr(note, "aliases", None) or (), base)
    return names


def _unknown(words: Sequence[str], names: Mapping[str, Any], remedy: str) -> UsageError:
    """The error for words that are no options: about the first that looks like one."""
    negations = [f"--no-{name[2:]}" for name, kind in names.items() if kind is bool]
    for word in words:
        if word.startswith("-") and word != "-":
            return unknown("option", word.partition("=")[0], [*names, *negations], remedy)
    return UsageError(f"unexpected argument {words[0]!r}; {remedy}")


def _default_hint(default: str) -> str:
    return "" if default in ("", "None", "False") else f"(default: {default})"


def _registry() -> tyro.constructors.ConstructorRegistry:
    """The types that tyro knows, with plain sentences for numbers and for optional values."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def number_or_optional(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        choices = [info.type]
        if get_origin(info.type) in (Union, types.UnionType):
            choices = [choice for choice in get_args(info.type) if choice is not types.NoneType]
        if len(choices) != 1 or choices[0] not in (int, float, str):
            return None
        return _scalar(choices[0])

    return registry


def _scalar(kind: Callable[[str], Any]) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"expected {_NUMBERS[kind]}, got {words[0]!r}") from None  # type: ignore[index]

    return tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs=1,
        metavar={int: "INT", float: "FLOAT"}.get(kind, "TEXT"),  # type: ignore[call-overload]
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, (int, float, str)),
        str_from_instance=lambda value: [str(value)],
    )


@contextlib.contextmanager
def _errors_as_sentences(arguments: Sequence[str]) -> Iterator[None]:
    """Turns what tyro prints before it exits with code 2 into a UsageError."""
    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    if not {"-h", "--help"} & set(arguments):
        os.environ["COLUMNS"] = "1000"  # no line of an error is wrapped inside a word
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as exit_:
        if exit_.code != 2:
            raise
        raise UsageError(_sentence(printed.getvalue())) from None
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns


def _sentence(box: str) -> str:
    r"""The message inside one of tyro's boxes, on one line.

    They hold a title, the message, a rule and hints. The title stands in the frame or, where the
    terminal has no box characters, above a rule of its own.

    Example:
        >>> _sentence("╭─ Error ─╮\n│ Error parsing --steps: expected │\n│ an integer. │\n│ ─── │")
        '--steps: expected an integer'
        >>> _sentence(" Error \n -----\n  Error parsing --steps: expected\n  an integer. \n ---- ")
        '--steps: expected an integer'
    """
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip("│ ")
        if re.fullmatch("─{3,}|-{3,}", text):
            sections.append([])
        elif not text.startswith(("╭", "╰")):
            sections[-1].append(text)
    message = sections[0] if "╭" in box or len(sections) == 1 else sections[1]
    sentence = " ".join(" ".join(message).split()).rstrip(".")
    for pattern, replacement in _REWORDED:
        sentence = re.sub(pattern, replacement, sentence)
    return sentence
