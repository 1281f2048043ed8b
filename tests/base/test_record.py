from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

import pytest
from pydantic import Field, model_validator

from tests.support.sentences import sentence
from workbench.base.entries import AGENT, GUARDIAN
from workbench.base.errors import ConfigError
from workbench.base.record import (
    Allowed,
    Count,
    Environment,
    Positive,
    Record,
    Size,
    Text,
    Unit,
    nested,
    read_kind,
)


class Engine(Record):
    """What drives it."""

    label: ClassVar[str] = "engine"

    power: Annotated[Positive, Unit("kW")] = 1
    """Its power."""


class Ship(Record):
    """A ship."""

    label: ClassVar[str] = "ship"
    kind: ClassVar[str] = "ship"
    sections: ClassVar[Mapping[str, str]] = {"masts": "Above water", "hull": "Below"}

    name: Text
    """What it is called."""
    masts: Annotated[Size, Unit("masts")] | None = None
    """Masts that carry sails."""
    boats: Count = 0
    """Lifeboats."""
    hull: Literal["steel", "wood"] = "wood"
    """What it is made of."""
    ports: Annotated[Sequence[Text], Allowed("a list of ports")] = ()
    """Where it calls."""
    engine: Annotated[Engine, nested(Engine.from_dict)] = Field(default_factory=Engine)
    """Its engine."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Its secrets."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hull == "steel" and self.masts:
            raise ConfigError("a hull of steel carries no masts")
        return self


class Raft(Record):
    """A raft."""

    kind: ClassVar[str] = "raft"


class Berth(Record):
    """A place in a port."""

    depth: Annotated[Size, Unit("m")]
    """Depth of the water."""
    ground: Literal["mud", "sand"] | None = None
    """What an anchor meets."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "A", "mast": 1},
            "ship option 'mast' is not known: did you mean 'masts'? Allowed: name, masts, ",
        ),
        ({"mast": 1, "boats": -1}, "ship option 'mast' is not known"),
        ({"boats": -1}, "ship of kind 'ship' needs the option 'name': What it is called."),
        ({"name": ""}, "ship name is ''; it must be text"),
        (
            {"name": "A", "masts": 0},
            "ship masts is 0; it must be a whole number, 1 or more, or None",
        ),
        ({"name": "A", "masts": True}, "ship masts is True; it must be a whole number"),
        ({"name": "A", "boats": 1.0}, "ship boats is 1.0; it must be a whole number, 0 or more"),
        ({"name": "A", "boats": "1"}, "ship boats is '1'; it must be a whole number, 0 or more"),
        (
            {"name": "A", "hull": "steal"},
            "ship hull 'steal' is not known: did you mean 'steel'? Allowed: steel, wood",
        ),
        (
            {"name": "A", "hull": ["wood"]},
            "ship hull ['wood'] is not known: did you mean 'wood'? Allowed: steel, wood",
        ),
        ({"name": "A", "ports": "Graz"}, "ship ports is 'Graz'; it must be a list of ports"),
        (
            {"name": "A", "ports": ["Graz", ""]},
            "ship ports is ['Graz', '']; it must be a list of ports",
        ),
        (
            {"name": "A", "engine": {"power": 0}},
            "engine power is 0; it must be a number more than 0",
        ),
        (
            {"name": "A", "engine": {"power": float("inf")}},
            "engine power is inf; it must be a number more than 0",
        ),
        ({"name": "A", "engine": 3}, "ship engine is 3; it must be an object"),
        ({"name": "A", "masts": {"a": "b"}}, "ship masts is a dict; it must be a whole number"),
        ({"name": "A", "ports": [{"a": "b"}]}, "ship ports is a list; it must be a list of ports"),
        ({"name": "A", "hull": "steel", "masts": 1}, "a hull of steel carries no masts"),
    ],
)
def test_a_refusal_names_the_option_the_value_and_what_is_allowed(
    options: dict[str, object], message: str
) -> None:
    for make in (lambda: Ship(**options), lambda: Ship.from_dict(options)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value).startswith(message)


def test_a_refusal_names_every_refused_option_once_and_unknown_ones_first() -> None:
    with pytest.raises(ConfigError) as refused:
        Ship(masts=0, hull="steal", ports=["Graz", "", ""], mats=1, bots=2, nane="A")  # type: ignore[call-arg,list-item]
    lines = [
        "ship option 'mats' is not known: did you mean 'masts'?",
        "ship option 'bots' is not known: did you mean 'boats'?",
        "ship option 'nane' is not known: did you mean 'name'? Allowed: name, ",
        "ship masts is 0; it must be a whole number, 1 or more",
        "ship hull 'steal' is not known: did you mean 'steel'? Allowed: steel, wood",
        "ship ports is ['Graz', '', '']; it must be a list of ports",
    ]
    said = str(refused.value).splitlines()
    assert len(said) == len(lines)
    for line, begins in zip(said, lines, strict=True):
        assert line.startswith(begins)
    assert "Allowed" not in said[0] + said[1]
    with pytest.raises(ConfigError) as refused:
        Ship(name="A", masts=0, boats=-1)
    assert len(str(refused.value).splitlines()) == 2


def test_the_options_are_listed_though_the_last_unknown_one_has_a_hint() -> None:
    class Hinting(Berth):
        """A berth that knows another name of the depth."""

        @classmethod
        def _hint(cls, name: str, value: object = None) -> str:
            del value
            return "use depth" if name == "draught" else ""

    with pytest.raises(ConfigError) as refused:
        Hinting.from_dict({"colour": 1, "draught": 2})
    assert str(refused.value).splitlines() == [
        "option 'colour' is not known. Allowed: depth, ground",
        "option 'draught' is not known: use depth",
    ]


def test_a_record_without_a_label_is_named_by_its_class() -> None:
    with pytest.raises(ConfigError) as refused:
        Berth.from_dict({})
    assert str(refused.value) == "Berth needs the option 'depth': Depth of the water."


def test_a_refusal_shows_no_value_of_the_environment() -> None:
    for env in (
        {"TOKEN": "canary", "a b": "canary"},
        {"TOKEN": "canary", "OTHER": ["canary"]},
        ["canary"],
    ):
        with pytest.raises(ConfigError, match="env") as refused:
            Ship(name="A", env=env)  # type: ignore[arg-type]
        assert "canary" not in "".join(traceback.format_exception(refused.value))
        assert refused.value.__context__ is None
    assert "canary" not in f"{Ship(name='A', env={'TOKEN': 'canary'})}"


def test_a_variable_that_linux_takes_for_no_program_is_refused_by_name() -> None:
    most = (128 << 10) - len("NAME=") - 1
    Ship(name="A", env={"NAME": "ü" * (most // 2)})
    with pytest.raises(ConfigError, match=sentence("write the value into a file")):
        Ship(name="A", env={"NAME": "x" * (most + 1)})


def test_the_json_form_is_whole_and_reads_back() -> None:
    ship = Ship(name="A", ports=("Graz",), engine=Engine(power=2))
    data = {
        "kind": "ship",
        "name": "A",
        "masts": None,
        "boats": 0,
        "hull": "wood",
        "ports": ["Graz"],
    }
    assert ship.to_dict() == {**data, "engine": {"power": 2}, "env": {}}
    assert Ship.from_dict(Ship(name="A").to_dict()) == Ship(name="A", ports=[])
    assert isinstance(Engine(power=2).power, int), "a whole number stays as it was written"
    with pytest.raises(ConfigError, match=sentence("is {}; it must be an object", "ship", 5)):
        Ship.from_dict(5)


def test_a_record_is_a_value() -> None:
    ship = Ship(name="A", boats=2)
    assert pickle.loads(pickle.dumps(ship)) == ship == Ship(name="A", boats=2) != Ship(name="A")
    assert hash(Engine()) == hash(Engine(power=1))
    assert ship.replace(boats=3) == Ship(name="A", boats=3)
    with pytest.raises(ConfigError, match="ship boats is -1"):
        ship.replace(boats=-1)
    with pytest.raises(
        AttributeError, match=sentence(".{} cannot be assigned to; {} is changed by .replace({}=…)")
    ):
        ship.boats = 5  # type: ignore[misc]
    assert repr(Engine(power=2)) == str(Engine(power=2)) == "Engine(power=2)"
    assert repr(Engine()) == "Engine()", "what is as it is by default is left out"
    assert repr(ship) == "Ship(name='A', boats=2)"


def test_help_shows_every_option() -> None:
    signature = str(inspect.signature(Ship))
    assert "(*, name: str, masts: int | None = None, boats: int = 0, hull" in signature
    assert "hull: Literal['steel', 'wood'] = 'wood'" in signature
    text = inspect.getdoc(Ship) or ""
    assert text.startswith(
        "A ship.\n\nArgs:\n    name: What it is called.\n    masts: Masts that carry sails.\n"
    )
    assert "    hull: What it is made of. One of steel, wood.\n" in text


def test_options_are_listed_for_pages_and_forms() -> None:
    options = {option.name: option for option in Ship.options()}
    assert list(options) == ["name", "masts", "boats", "hull", "ports", "engine", "env"]
    assert [o.section for o in options.values()] == [
        "",
        "Above water",
        "Above water",
        "Below",
        "Below",
        "Below",
        "Below",
    ]
    assert [options[name].required for name in ("name", "hull")] == [True, False]
    hull, masts = options["hull"], options["masts"]
    assert (hull.choices, hull.default, hull.meaning) == (
        ("steel", "wood"),
        "wood",
        "What it is made of.",
    )
    assert (masts.unit, masts.allowed, masts.default) == (
        "masts",
        "a whole number, 1 or more, or None",
        None,
    )
    assert (options["engine"].default, options["env"].default) == (Engine(), {})
    depth, ground = Berth.options()
    assert (depth.unit, depth.choices) == ("m", ())
    assert (ground.unit, ground.choices) == ("", ("mud", "sand"))
    assert ground.allowed == "one of mud, sand, or None"


def test_the_key_kind_selects_the_record() -> None:
    kinds: tuple[type[Ship] | type[Raft], ...] = (Ship, Raft)
    assert read_kind("vessel", {"kind": "raft"}, kinds) == Raft()
    for data in ({"kind": "raf"}, {}, {"kind": ["raft"]}):
        with pytest.raises(ConfigError, match=r"vessel kind .* is not known.* Allowed: ship, raft"):
            read_kind("vessel", data, kinds)


def test_what_starts_on_every_pod_loads_no_record() -> None:
    code = f"import sys, {AGENT}, {GUARDIAN}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pydantic" not in run.stdout.split()
