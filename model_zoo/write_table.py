"""Write the table of models in model_zoo/README.md from index.json.

Run:  python model_zoo/write_table.py
"""

from pathlib import Path

from vitkit import model_zoo

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- models: python model_zoo/write_table.py -->\n", "<!-- end of models -->\n"


def table() -> str:
    """Format the index in Markdown: one row for each name."""
    lines = [
        "| name, with its config | data | published | parameters | licence | weights |",
        "|---|---|---|--:|---|---|",
    ]
    for name, entry in model_zoo.index().items():
        published = ", ".join(f"{metric} {value}" for metric, value in list(entry["published"].items())[:2])
        parameters = f"{entry['parameters'] / 1e6:.1f} M" if "parameters" in entry else ""
        file = f"[file]({entry.get('page', entry['url'])})"
        cells = f"[`{name}`](../{entry['config']})", entry["dataset"], published, parameters, entry["licence"], file
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return the README's text with the current table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
