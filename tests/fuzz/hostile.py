"""Values that somebody might put into the text formats of annotations, and changes of their structure."""

import copy
import random
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from fuzz.guard import MARKER, SCRIPT, VICTIM
from fuzz.mutate import JUNK, mutate_bytes

CODE = f'open("{MARKER}", "w").close()'
"""Code whose run is noticed."""
PATHS = ("../victim/secret.jpg", "../../victim/secret.jpg", f"{VICTIM}/secret.jpg", "..", ".", "/", "/etc/passwd")
PATHS += ("/dev/zero", "images/../../victim/secret.jpg", "0.jpg/..", "C:\\x.jpg", "..\\victim\\secret.jpg", "-rf", "~")
PATHS += (f"{VICTIM}/new.jpg", "../victim/new.jpg", "a/" * 3000 + "0.jpg", "0.jpg/" * 40, "x" * 300 + ".jpg")
PATHS += ("images\\0.jpg", "./images/0.jpg", "0", "0.JPG", "images//0.jpg", "*", "http://127.0.0.1:9/0.jpg")
NAMES = ("", " ", " cat ", "cat\n", "a\nb", "a\r\nb", "a\tb", "\x1b[31mred", "\x1b]0;title\x07", "\0", "\x01", "\x85")
NAMES += (f"{SCRIPT}()</script>", '"><img src=x onerror=fuzz()>', "</script>" + SCRIPT, "{x}", "%s", "%(x)s", "$HOME")
NAMES += (f'a"""\n{CODE}\nb"""', f"'''\n{CODE}\n'''", f"\\U {CODE}", "\\N{x}", '"', "'", "\\", "`id`", "#")
NAMES += (f"x\n{CODE}", "é", "한국어", "👩‍👩‍👧", "\u202eabc", "\u2028", "\ufeffcat", "\ud800", "İ", "x" * 3000)
NAMES += ("-1", "0", "nan", "null", "~")
NAMES += ("CON", "a:b", "a,b", "a;b", "cat:1,2,3", "class_0", "cats", "CAT", "train", "val", "=1+1", "[a]", "- a", "{")
NUMBERS = ("nan", "inf", "-inf", "1e300", "-1e300", "1e-300", "1e400", "3e9", "-3e9", "2147483648", "9e18", "1e8")
NUMBERS += ("-1e8", "-0", "0", "1", "-1", "0.5", "1.5", "1.0000001", "40", "41", "32", "33", "1e3", "+5", "5.", ".5")
NUMBERS += ("0x10", "1_0", "", " ", "x", "½", "٣", "1,5", "9" * 400, "9" * 5000, "1 2", "1;2", "--1", "1e", "True")
NUMBERS += ("None", "１")
TEXTS = (*NAMES, *PATHS, *NUMBERS)
VALUES = [*JUNK, *TEXTS, 3e9, -3e9, 9e18, 1e8, 1 << 31, 10**400, [CODE], {"a": {"b": [1]}}, [["a"]], [[1, 2]]]
"""Values of any kind that may replace one in a JSON or YAML file."""


def pick(rng: random.Random, *choices: Sequence[Any]) -> Any:
    """Return a value of one of several tables, each of which is as likely as the others."""
    return rng.choice(rng.choice(choices))


def mutate_tokens(lines: list[list[str]], rng: random.Random, texts: Sequence[str] = NUMBERS) -> list[list[str]]:
    """Return lines of tokens with a few of them replaced, removed, repeated, or swapped; or with lines changed so."""
    lines = copy.deepcopy(lines)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        action = rng.choice(["replace", "replace", "replace", "replace", "remove", "repeat", "swap", "line", "lines"])
        if action == "lines" or not lines:
            lines.insert(rng.randrange(len(lines) + 1), [rng.choice(texts) for _ in range(rng.randrange(8))])
            continue
        row = rng.choice(lines)
        if action == "line":
            lines.insert(rng.randrange(len(lines) + 1), list(row)) if rng.random() < 0.5 else lines.remove(row)
        elif row:
            k = rng.randrange(len(row))
            if action == "replace":
                row[k] = rng.choice(texts)
            elif action == "remove":
                del row[k]
            elif action == "repeat":
                row.insert(k, row[k])
            else:
                other = rng.randrange(len(row))
                row[k], row[other] = row[other], row[k]
    return lines


def encoded(text: str, rng: random.Random) -> bytes:
    """Return a text file's bytes, sometimes in another encoding, with other ends of lines, or damaged."""
    data = text.encode("utf-8", "surrogatepass")
    action = rng.choice(["plain"] * 16 + ["bytes", "bytes", "windows", "mark", "utf-16", "latin-1", "nul", "endless"])
    if action == "bytes":
        return mutate_bytes(data, rng)
    if action == "windows":
        return data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b"\x85", b"\x0b"]))
    if action == "mark":
        return b"\xef\xbb\xbf" + data
    if action == "utf-16":
        return text.encode("utf-16", "surrogatepass")
    if action == "latin-1":
        return text.replace("cat", "é").encode("latin-1", "replace")
    if action == "nul":
        return data + b"\0"
    return data + data[-40:] * 20_000 if action == "endless" and rng.random() < 0.2 else data


def mutate_xml(root: ElementTree.Element, rng: random.Random, texts: Sequence[str] = TEXTS) -> bytes:
    """Return an XML file with changed texts, attributes and elements, and sometimes with changed bytes."""
    root = copy.deepcopy(root)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        element = rng.choice(list(root.iter()))
        action = rng.choice(["text", "text", "text", "attribute", "attribute", "remove", "repeat", "rename", "move"])
        children = list(element)
        if action == "attribute" and element.attrib:
            key = rng.choice(list(element.attrib))
            if rng.random() < 0.1:
                del element.attrib[key]
            else:
                element.attrib[key] = pick(rng, texts, NUMBERS)
        elif action == "remove" and children:
            element.remove(rng.choice(children))
        elif action == "repeat" and children:
            element.insert(rng.randrange(len(children) + 1), copy.deepcopy(rng.choice(children)))
        elif action == "rename" and rng.random() < 0.3:
            element.tag = rng.choice(["x", "object", "image", "box", "mask", "name", "é"])
        elif action == "move" and children:
            children[0].append(copy.deepcopy(rng.choice(children)))
        else:
            element.text = pick(rng, texts, NUMBERS)
    text = _as_xml(root)
    if rng.random() < 0.06:
        text = rng.choice([_bomb, _deep, _declared])(text)
    if rng.random() < 0.06:
        return text.encode(rng.choice(["utf-16", "utf-32", "utf-7", "latin-1", "cp037"]), "replace")
    return encoded(text, rng)


def _as_xml(element: ElementTree.Element) -> str:
    """Return XML whose texts may hold characters that are not allowed in it."""
    attributes = "".join(f' {key}="{_escaped(value)}"' for key, value in element.attrib.items())
    inside = _escaped(element.text or "") + "".join(map(_as_xml, element))
    return f"<{element.tag}{attributes}>{inside}</{element.tag}>\n"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _bomb(text: str) -> str:
    entities = "".join(f'<!ENTITY e{k} "{f"&e{k - 1};" * 10}">' for k in range(1, 10))
    return f'<!DOCTYPE x [<!ENTITY e0 "ten letters">{entities}]>{text.replace("cat", "&e9;")}'


def _deep(text: str) -> str:
    return "<a>" * 200_000 + text + "</a>" * 200_000


def _declared(text: str) -> str:
    return f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{VICTIM}/secret.txt">]>{text.replace("cat", "&e;")}'


def yaml_fragments() -> tuple[str, ...]:
    """Return YAML values that are valid, and hard to read or dangerous."""
    levels = "".join(f"  - &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 10))
    return (
        f"\n  - &a0 [cat, cat]\n{levels}",
        f"!!python/object/apply:builtins.exec ['{CODE}']",
        f"!!python/object/new:os.system ['touch {MARKER}']",
        *("2001-13-45", "2001-12-14t21:59:43.10-05:00", '!!int "x"', '!!float "x"', "!!binary x", "!!timestamp x"),
        *("!!set {a, b}", "!!omap [a: 1]", "&a [*a]", "*unknown", "9" * 5000, "0b2", "190:20:30"),
        *("[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000),
        *(".inf", ".nan", "{.inf: cat, 0: dog}", "{[1]: cat}", "{0: cat, 0: dog}", "{<<: {0: cat}}"),
        *("|\n    cat\n    dog", "'a\n\n  b'", '"\\U00110000"', '"\\e[31m"', '"\\0"'),
        "[" + "x, " * 20_000 + "x]",
        "\n" + "".join(f"  k{k}: {k}\n" for k in range(50_000)),
    )
