"""Lists a config: every value, including defaults, and where each was set."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitkit.config.load import Config
from vitkit.config.schema import MISSING, TOP_LEVEL, Slot, join_key, resolve, slots_in


def format_config(cfg: Config) -> str:
    """Return a listing of a checked config: every value, including arguments left at their defaults, and its origin."""
    lines = [line for key, value in cfg.items() for line in _lines(cfg, key, key, value, TOP_LEVEL[key])]
    # A few very long values must not push all comments out of sight.
    column = max((len(text) for text, _ in lines if len(text) <= 60), default=0)
    return "\n".join(f"{text:<{column}}  # {origin}" if origin else text for text, origin in lines)


def _lines(
    cfg: Config, key: str, name: str, value: Any, slot: Slot, depth: int = 0, origin: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the text and origin of each line of `format_config` for a key, whose last part is `name`, and everything
    below it."""
    indent = "    " * depth
    if slot.registry is not None and isinstance(value, str | Mapping):
        _, arguments = resolve(slot, value, key)
        chosen = "" if slot.section else f" {value if isinstance(value, str) else value['type']}"
        line_origin = origin or cfg.origins.get(key) or cfg.origins.get(f"{key}.type", "")
        yield f"{indent}{name}:{chosen}", line_origin
        for argument, below in slots_in(slot, value, key).items():
            sub = join_key(key, argument)
            if argument in arguments:
                set_here = isinstance(value, Mapping) and argument in value
                below_origin = origin if set_here else f"variant{chosen}"
                yield from _lines(cfg, sub, argument, arguments[argument], below, depth + 1, below_origin)
            elif argument != "type" and below.default is not MISSING:
                yield from _lines(cfg, sub, argument, below.default, below, depth + 1, "default")
    elif value and (isinstance(value, Mapping) or (slot.registry is not None and isinstance(value, list | tuple))):
        yield f"{indent}{name}:", ""
        for part, below in slots_in(slot, value, key).items():
            item = value[part] if isinstance(value, Mapping) else value[int(part)]
            yield from _lines(cfg, join_key(key, part), str(part), item, below, depth + 1, origin)
    else:
        yield f"{indent}{name} = {value!r}", origin or cfg.origins.get(key, "")
