"""Tables of settings, as config files have them, checked: what cannot be used is refused by the name of its field."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from omni_fsm.protocol.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)


def texted(field: str, given: object) -> dict[str, Any]:
    """A table of settings.

    Raises:
        ConfigError: It is none, or has a key that is no text.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(field, given, "a table of settings")
    for key in given:
        if not isinstance(key, str):
            raise ConfigError(field, key, "keys that are text")
    return dict(given)


def converted(field: str, given: object, kind: type[Config]) -> Config:
    """What a config file has, as the struct that it must be.

    Raises:
        ConfigError: Names the part that it cannot be.
    """
    if isinstance(given, msgspec.Struct):
        given = msgspec.structs.asdict(given)
    if not isinstance(given, Mapping):
        raise ConfigError(field, given, f"a table of {', '.join(kind.__struct_fields__)}")
    for key, value in texted(field, given).items():
        if isinstance(value, Mapping):
            texted(f"{field}.{key}", value)
        if key not in kind.__struct_fields__:
            raise ConfigError(f"{field}.{key}", given[key], f"one of {', '.join(kind.__struct_fields__)}")
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        fault, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        expected = fault.partition(", got ")[0].removeprefix("Expected ").replace("`object`", "a table")
        expected = expected.replace("Object missing required field", "a table with")
        raise ConfigError(f"{field}.{name}" if name else field, given.get(name, dict(given)), expected) from None
