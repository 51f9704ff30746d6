"""`verl-lab export`: a run's model as a folder for transformers or peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from verl_lab.cli.terminal import print_line


def export(
    run: Annotated[
        str,
        typer.Option("--run", metavar="RUN", help="A run folder, or RUN@CHECKPOINT for an older."),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to write.")],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16; by default the run's."),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge/--no-merge", help="Add low-rank adapters to the weights, or not."),
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty.")
    ] = False,
) -> None:
    """Write the model of a run where transformers can load it.

    Example: verl-lab export --run runs/quickstart --to exported
    """
    from verl_lab.models.export import export as write

    folder = write(run, to, dtype=dtype, merge=merge, overwrite=force)
    print_line(f"Wrote {folder}. Load it with:")
    print_line(f"  {_loader(folder)}")


def _loader(folder: Path) -> str:
    """The Python that loads what was written."""
    adapters = folder / "adapter_config.json"
    if adapters.exists():
        base = Path(json.loads(adapters.read_text())["base_model_name_or_path"])
        if base.suffix == ".gguf":
            policy = (
                f"transformers.AutoModelForCausalLM.from_pretrained({str(base.parent)!r}, "
                f"gguf_file={base.name!r})"
            )
            return f"peft.PeftModel.from_pretrained({policy}, {str(folder)!r})"
        return f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"
    found = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    kind = "SequenceClassification" if "Sequence" in found[0] else "CausalLM"
    return f"transformers.AutoModelFor{kind}.from_pretrained({str(folder)!r})"
