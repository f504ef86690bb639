"""Put a trained run into the package, as one of the models that load without a download.

Writes the weights in half precision to model_zoo/weights, with a checksum in the file's name as in those of torch's
hub, and prints the model's entry for index.json with the figures of that file. Then run model_zoo/write_table.py.

Run:  python model_zoo/package_weights.py shapes_dino runs/dino quickstart/dino bbox/AP bbox/AP50
"""

import hashlib
import json
import sys
from pathlib import Path

import vitkit

FOLDER = Path(__file__).parent


def package(name: str, run: Path, config: str, metrics: list[str]) -> dict:
    """Write the file and return its entry.

    Args:
        name: the model's name in the index.
        run: the folder of the run.
        config: the name of the run's config, which trains the model unchanged.
        metrics: the names of the figures to state.
    """
    written = FOLDER / "weights" / f"{name}.safetensors"
    vitkit.convert(run, written, precision="fp16")
    checksum = hashlib.sha256(written.read_bytes()).hexdigest()[:8]
    for old in written.parent.glob(f"{name}-*"):
        old.unlink()
    path = written.rename(written.with_stem(f"{name}-{checksum}"))
    figures = vitkit.test(path).metrics
    last = json.loads((run / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return dict(
        config=config,
        url=path.relative_to(FOLDER).as_posix(),
        checksum=f"sha256:{checksum}",
        size_mb=round(path.stat().st_size / 1e6, 2),
        license="Apache-2.0",
        dataset=vitkit.load_config(config)["data"]["val"]["type"],
        measured={metric: round(figures[metric], 3) for metric in metrics},
        processor_minutes=round(last["processor_minutes"], 1),
        parameters=sum(p.numel() for p in vitkit.load(path).model.parameters()),
    )


if __name__ == "__main__":
    name, run, config, *metrics = sys.argv[1:]
    entry = package(name, Path(run), config, metrics)
    print(f'  "{name}": {{')
    print(",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()))
    print("  }")
