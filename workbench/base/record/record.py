"""Records with checked options.

A refusal names option, value, allowed values and the nearest option.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from workbench.base.errors import ConfigError, one_of, option_named, shortened
from workbench.base.files import user_path
from workbench.base.json_values import as_list, as_objects, problem_in
from workbench.base.record.types import Allowed, Exists, Unit

# Pages and forms show the docstrings. On pods this package is a zip. No program reads docstrings
# there, and inspect would compare every loaded module for each class (6 s beside torch).
_HAS_SOURCE = Path(__file__).is_file()
_CHECKS_PATHS = ContextVar("_CHECKS_PATHS", default=True)
"""Whether a user makes the record, and not a file of a run."""


def _takes(field: FieldInfo, value: object) -> bool:
    """Whether an option may have a value."""
    with suppress(ValidationError):
        TypeAdapter(field.rebuild_annotation()).validate_python(value, strict=True)
        return True
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a record, for pages and forms."""

    name: str
    meaning: str
    allowed: str
    choices: Sequence[str]
    """Closed set of values; empty for an open set."""
    default: object
    required: bool
    unit: str
    """Unit of the value, such as tokens; empty without a unit."""
    section: str
    """Heading of the option; empty in a record without sections."""

    @property
    def help(self) -> str:
        if not self.choices:
            return self.meaning
        text, replaced = re.subn(r"One of `\w+`", f"One of {', '.join(self.choices)}", self.meaning)
        return text if replaced else f"{text} One of {', '.join(self.choices)}."


class Record(BaseModel):
    """Immutable options, checked when the record is made."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=_HAS_SOURCE,
        hide_input_in_errors=True,
    )
    label: ClassVar[str] = ""
    """What a refusal says before the name of an option."""
    kind: ClassVar[str] = ""
    """The word for it in JSON, where records of several kinds may stand."""
    positional: ClassVar[tuple[str, ...]] = ()
    """Options that may be given without a name, in this order."""
    first: ClassVar[tuple[str, ...]] = ()
    """Options that most people set. They stand first in help texts, on pages and in forms."""
    sections: ClassVar[Mapping[str, str]] = {}
    """Headings for a page or a form, by the first option of every section."""

    def __init__(self, *values: object, **options: object) -> None:
        if len(values) > len(self.positional):
            raise self._by_name(values[len(self.positional)])
        for name, value in zip(self.positional, values, strict=False):
            if name in options:
                raise ConfigError(f"{type(self).__name__} has two values for {name!r}; drop one")
            options[name] = value
        secret = self._secret()
        with option_named(options, secret=secret):
            for name, value in options.items():
                if unfit := problem_in(value):
                    words = [part for part in (self.label, name, unfit) if part]
                    raise ConfigError(f"{' '.join(words)}; correct it")
        problem = None
        try:
            super().__init__(**options)
        except ValidationError as error:
            problem = self._refusal(error, options)
        if problem is not None:
            problem.name_option(options, secret=secret)
            raise problem  # out of the handler: its error would show the values of secrets
        if _CHECKS_PATHS.get():
            with option_named(options, secret=secret):
                self._check_paths(options)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        types = get_type_hints(
            SimpleNamespace(__annotations__={n: f.annotation for n, f in cls._fields().items()})
        )
        parameters = [p for p in inspect.signature(cls).parameters.values() if p.name in types]
        cls.__signature__ = inspect.Signature(
            [
                p.replace(
                    annotation=_TypeText.of(types[p.name]),
                    kind=p.POSITIONAL_OR_KEYWORD if p.name in cls.positional else p.kind,
                )
                for p in sorted(
                    parameters,
                    key=lambda p: (p.name not in cls.positional, p.name not in cls.first),
                )
            ]
        )
        options = sorted(cls.options(), key=lambda option: option.name not in cls.first)
        lines = [f"    {option.name}: {option.help}" for option in options]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])

    def __dir__(self) -> list[str]:
        """Return what an editor completes: options and calls for users, nothing of pydantic."""
        public = {*type(self).model_fields, *_PUBLIC}
        return [name for name in super().__dir__() if name in public or name.startswith("_")]

    @classmethod
    def _by_name(cls, value: object) -> ConfigError:
        """Return the refusal of a value without a name, with the first option of such values."""
        if cls.positional:
            taken = " and ".join(cls.positional)
            meant = [option.name for option in cls.options() if value in option.choices]
            example = f": write {meant[0]}={value!r}" if meant else ""
            return ConfigError(
                f"{cls.__name__} takes {taken} without a name, and all other options by name; "
                f"{shortened(value)} has no name{example}"
            )
        name = next((name for name, field in cls._fields().items() if _takes(field, value)), "")
        remedy = f"one of {', '.join(cls._fields())}"
        if name:
            remedy = f"write {cls.__name__}({name}={shortened(value)})"
        return ConfigError(f"{cls.__name__} takes options by name alone: {remedy}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse assignments without showing the value, which may be secret.

        Private attributes may change.
        """
        if name in type(self).__private_attributes__:
            return super().__setattr__(name, value)
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be assigned "
            f"to; {name} is changed by .replace({name}=…)"
        )

    def __str__(self) -> str:
        return repr(self)

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Omit options with default values; the rest recreates the record."""
        for name, value in super().__repr_args__():
            field = type(self).model_fields[str(name)]
            if field.is_required() or value != field.get_default(call_default_factory=True):
                yield name, value

    @classmethod
    def options(cls) -> list[Option]:
        """Return every option with its meaning, default and allowed values."""
        options: list[Option] = []
        for name, field in cls._fields().items():
            section = cls.sections.get(name, options[-1].section if options else "")
            options.append(_option(name, field, section))
        return options

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read the JSON form."""
        match data:
            case Mapping():
                options = {str(key): value for key, value in data.items()}
                if cls.kind:
                    options.pop("kind", None)
                return cls._made(options)
        raise ConfigError(f"{cls.label or 'the record'} is {_shown(data)}; it must be an object")

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form with every default spelled out; `from_dict` reads it back."""
        return {**({"kind": self.kind} if self.kind else {}), **self.model_dump(mode="json")}

    def replace(self, **changes: object) -> Self:
        """Return a copy with some options changed and checked; unset options stay unset."""
        made = self._made({**self.as_given(), **changes})
        if _CHECKS_PATHS.get():
            made._check_paths([name for name in changes if changes[name] != getattr(self, name)])
        return made

    @classmethod
    def _made(cls, options: Mapping[str, object]) -> Self:
        """Make a record whose files may be gone or on another machine."""
        mark = _CHECKS_PATHS.set(False)
        try:
            return cls(**options)
        finally:
            _CHECKS_PATHS.reset(mark)

    def _check_paths(self, names: Iterable[str]) -> None:
        """Refuse paths that do not exist here, of options that a user gives."""
        for name in names:
            field = self._fields()[name]
            marks = [p for p in _parts(field.annotation, field.metadata) if isinstance(p, Exists)]
            value = getattr(self, name)
            if marks and isinstance(value, str) and not any(each.unless in value for each in marks):
                _check_exists(f"{self.label} {name}".strip(), value)

    def as_given(self) -> dict[str, object]:
        """Return the options that were given, without defaults."""
        return {name: value for name, value in self if name in self.model_fields_set}

    def option_named(self) -> AbstractContextManager[None]:
        """Let refusals of the block carry the refused option of the record."""
        return option_named(self.as_given(), secret=self._secret())

    @classmethod
    def _secret(cls) -> list[str]:
        return [name for name, field in cls._fields().items() if not field.repr]

    @classmethod
    def _hint(cls, name: str, value: object = None) -> str:  # noqa: ARG003  # for classes that know more
        """Return the replacement for an unknown option or a refused value; empty if unknown."""
        return ""

    @classmethod
    def _hint_beside(cls, name: str, options: Mapping[str, object]) -> str:  # noqa: ARG003
        """Return the replacement for an unknown option beside other options; empty if unknown."""
        return cls._hint(name)

    @classmethod
    def _fields(cls) -> Mapping[str, FieldInfo]:
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def _refusal(cls, error: ValidationError, options: Mapping[str, object]) -> ConfigError:
        """Word an error of pydantic for every option; unknown options come first."""
        errors = error.errors(include_url=False, include_input=False)
        unknown = [str(each["loc"][0]) for each in errors if each["type"] == "extra_forbidden"]
        # The last unknown option without a hint of its class lists all options, once for all.
        unhinted = [name for name in unknown if not cls._hint_beside(name, options)]
        # Beside an unknown option, a missing one is probably the one that was meant.
        errors = [each for each in errors if not unknown or each["type"] != "missing"]
        errors.sort(key=lambda each: _FIRST.get(each["type"], len(_FIRST)))
        refusals: dict[tuple[int | str, ...], ConfigError] = {}
        for problem in errors:
            option = problem["loc"][:1]
            if option not in refusals:
                is_last = [*option] == unhinted[-1:]
                refusals[option] = cls._worded(problem, options, listed=is_last)
        (first, refusal), *others = refusals.items()
        if others:
            refusal = ConfigError("\n".join(map(str, refusals.values())))
        refusal.option = "".join(map(str, first))
        return refusal

    @classmethod
    def _worded(
        cls, problem: ErrorDetails, options: Mapping[str, object], *, listed: bool
    ) -> ConfigError:
        label = f"{cls.label} " if cls.label else ""
        match problem.get("ctx", {}).get("error"):
            case ConfigError() as own:
                return own
        if not problem["loc"]:  # a key that is half of a surrogate pair
            odd = next((key for key in options if not key.isprintable()), "")
            return ConfigError(f"{label}option {odd!r} is not known: the name is no valid text")
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            if hint := cls._hint_beside(name, options):
                return ConfigError(f"{label}option {name!r} is not known: {hint}")
            return one_of(f"{label}option", name, cls._fields(), listed=listed)
        option = _option(name, cls._fields()[name])
        if problem["type"] == "missing":
            what = f"{cls.label} of kind {cls.kind!r}" if cls.kind else cls.label or cls.__name__
            return ConfigError(f"{what} needs the option {name!r}: {option.meaning}")
        if hint := cls._hint(name, options[name]):
            return ConfigError(f"{label}{name} {shortened(options[name])} is not offered: {hint}")
        if option.choices:
            return one_of(f"{label}{name}", options[name], option.choices)
        value = f"is {_shown(options[name])}" if cls._fields()[name].repr else "cannot be used"
        return ConfigError(f"{label}{name} {value}; it must be {option.allowed}")


def _check_exists(what: str, path: str) -> None:
    place = user_path(path)
    folder = place.parent.absolute()
    try:
        if place.exists():
            return
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    except OSError:  # submit names the fault of a path that is no file name, or is not to be seen
        return
    near = get_close_matches(place.name, names, n=1)
    meant = f"Did you mean {str(place.with_name(near[0]))!r}?" if near else "Correct the path."
    raise ConfigError(f"{what} {shortened(path)} does not exist in {folder}. {meant}")


_PUBLIC = ("kind", "from_dict", "options", "replace", "to_dict")
_R = TypeVar("_R", bound=Record)


def nested(read: Callable[[Any], object]) -> BeforeValidator:
    """Return a part of a type by which a JSON object may stand for a record."""

    def read_object(value: object) -> object:
        match value:
            case Mapping():
                return read(value)
        return value

    return BeforeValidator(read_object)


def read_kind(what: str, data: Mapping[str, object], classes: Iterable[type[_R]]) -> _R:
    """Read a record of the class that the key `kind` selects."""
    kinds = {cls.kind: cls for cls in classes}
    kind = data.get("kind")
    cls = next((cls for name, cls in kinds.items() if name == kind), None)
    if cls is None:
        raise one_of(f"{what} kind", kind, kinds)
    return cls.from_dict(data)


def _shown(value: object) -> str:
    """Return a refused value for the message; the type of an object with possible secrets."""
    return (
        f"a {type(value).__name__}" if as_objects(as_list(value) or [value]) else shortened(value)
    )


class _TypeText(str):
    __slots__ = ()
    __repr__ = str.__str__

    @classmethod
    def of(cls, annotation: object) -> Self:
        text = re.sub(r"\b(\w+\.)+", "", inspect.formatannotation(annotation))
        return cls(re.sub(r"Optional\[(.*)\]", r"\1 | None", text))


def _option(name: str, field: FieldInfo, section: str = "") -> Option:
    return Option(
        name=name,
        meaning=" ".join((field.description or "").split()),
        allowed=_allowed(field.annotation, field.metadata),
        choices=_choices(field),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        required=field.is_required(),
        unit=next(
            (
                part.name
                for part in _parts(field.annotation, field.metadata)
                if isinstance(part, Unit)
            ),
            "",
        ),
        section=section,
    )


def _choices(field: FieldInfo) -> Sequence[str]:
    """Return the closed set of an option's values, for an optional value too."""
    is_union = get_origin(field.annotation) in _UNIONS
    types = (
        [each for each in get_args(field.annotation) if each is not NoneType]
        if is_union
        else [field.annotation]
    )
    kind = types[0]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_args(kind) if len(types) == 1 and get_origin(kind) is Literal else ()


_FIRST = {"extra_forbidden": 0, "missing": 1}
_WORDS: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Mapping: "an object",
    Sequence: "a list of texts",
    NoneType: "None",
}
_UNIONS = (Union, UnionType)
_BOUNDS = {
    "ge": ", {} or more",
    "gt": " more than {}",
    "lt": " and less than {}",
    "le": " and {} or less",
}


def _parts(annotation: object, metadata: Iterable[Any]) -> Iterator[Any]:
    for part in metadata:
        yield from part.metadata if isinstance(part, FieldInfo) else (part,)
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        yield from _parts(args[0], args[1:])
    elif get_origin(annotation) in _UNIONS:
        for arg in args:
            yield from _parts(arg, ())


def _allowed(annotation: object, metadata: Iterable[Any]) -> str:
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return _allowed(args[0], [*args[1:], *metadata])
    own = list(_parts(None, metadata))
    for part in own:
        if isinstance(part, Allowed):
            return part.words
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin in _UNIONS:
        several = dict.fromkeys(
            _allowed(arg, ()) for arg in args if not (arg is int and float in args)
        )
        words = (", or " if "," in "".join(several) else " or ").join(several)
    else:
        words = _WORDS.get(origin or annotation, "an object")
    return words + "".join(
        text.format(getattr(part, mark))
        for mark, text in _BOUNDS.items()
        for part in own
        if hasattr(part, mark)
    )
