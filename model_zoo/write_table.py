"""Write the tables of models in model_zoo/README.md and models.md from index.json, and that of the records.

Run:  python model_zoo/write_table.py
"""

from functools import cache
from pathlib import Path

from vitkit import model_zoo
from vitkit.apps.reproduction.records import TABLE, Record, format_table, read_records
from vitkit.config import find_config

ZOO = Path(__file__).parent
CONFIGS = ZOO.parent / "configs"
RECORDS = ZOO / "records"
BEGIN = "<!-- {}: python model_zoo/write_table.py -->\n"
END = "<!-- end of {} -->\n"


def _link(config: str) -> str:
    """Return the path of the file with a config, which may be that of its family."""
    return f"../configs/{find_config(config).file.relative_to(CONFIGS).as_posix()}"


@cache
def records() -> dict[str, Record]:
    """Return the records of this project by the names of their files."""
    return read_records(RECORDS)


def _measured(name: str) -> str:
    """Return links to the records of a model: the day and what it was measured on."""
    found = {file: record for file, record in records().items() if record.name == name}
    return "; ".join(f"[{record.timing['date']}, {record.device}](records/{file})" for file, record in found.items())


def published_table() -> str:
    """Format the models that are downloaded in Markdown: one row for each name."""
    lines = [
        "| name, with its config | data | published | parameters | license | weights | measured here by |",
        "|---|---|---|--:|---|---|---|",
    ]
    for name, entry in model_zoo.index().items():
        if model_zoo.is_packaged(name):
            continue
        published = ", ".join(f"{metric} {value}" for metric, value in list(entry["published"].items())[:2])
        parameters = f"{entry['parameters'] / 1e6:.1f} M" if "parameters" in entry else ""
        file = f"[file]({entry.get('page', entry['url'])})"
        cells = f"[`{name}`]({_link(entry['config'])})", entry["dataset"], published, parameters, entry["license"], file
        cells = *cells, _measured(name)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def packaged_table() -> str:
    """Format the models in the package in Markdown: one row for each name."""
    lines = [
        "| name | trained by | processor minutes | measured | MB | measured here by |",
        "|---|---|--:|---|--:|---|",
    ]
    for name, entry in model_zoo.index().items():
        if model_zoo.is_packaged(name):
            measured = ", ".join(f"{metric} {value}" for metric, value in entry["measured"].items())
            commands = [f"[`vitkit train {entry['config']}`]({_link(entry['config'])})"]
            commands += [f"`{command}`" for command in entry.get("then", ())]
            cells = f"`{name}`", ", ".join(commands), str(entry["processor_minutes"]), measured, str(entry["size_mb"])
            cells = *cells, _measured(name)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES = {"models.md": ("models", published_table), "README.md": ("models in the package", packaged_table)}
"""File -> the name of its table, and what formats it."""


def with_table(text: str, name: str, table: str) -> str:
    """Return a document's text with the current table of a name."""
    before, _, rest = text.partition(BEGIN.format(name))
    return before + BEGIN.format(name) + table + END.format(name) + rest.partition(END.format(name))[2]


if __name__ == "__main__":
    for file, (name, make) in TABLES.items():
        path = ZOO / file
        path.write_text(with_table(path.read_text(encoding="utf-8"), name, make()), encoding="utf-8")
    (RECORDS / TABLE).write_text(format_table(records().items()), encoding="utf-8")
