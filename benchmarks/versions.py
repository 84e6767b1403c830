"""Which versions of torch and Python does gradherd run with? An environment for each, and a suite.

    python -m benchmarks.versions --torch 2.7,2.9,2.11,2.13,newest --out versions.md

Each environment is made in a temporary folder and deleted after its run. With the Python that runs
this program, only torch is installed there, and all else is borrowed from the environment of this
program; with another (`--python python3.13`), the packages that the suite needs are installed, too.
What installs from where is up to pip's own configuration.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parent.parent
# With these alone the suite runs.
PACKAGES = ("numpy", "safetensors", "rich", "pytest", "pytest-timeout", "hypothesis", "torchdata")
SUITE: dict[str, tuple[str, ...]] = {
    "orders": (
        "tests/contracts/test_policies.py::test_orders_are_permutations_after_every_epoch",
        "tests/contracts/test_policies.py::test_resume_is_no_resume",
    ),
    "sparsifiers": (
        "tests/contracts/test_sparsifiers.py::test_nothing_is_lost",
        "tests/contracts/test_sparsifiers.py::test_all_ranks_hold_the_same_bits",
    ),
    "DDP": (
        "tests/attach/test_coordinated_hook.py::test_four_ranks_find_the_orders_of_their_batches",
        "tests/attach/test_coordinated_hook.py::test_state_in_mid_epoch",
        "tests/attach/test_sparse_hook.py::test_nothing_is_lost_when_buckets_are_rebuilt",
        "tests/attach/test_sparse_hook.py::test_both_halves_in_one_loop",
    ),
    "FSDP2": (
        "tests/attach/test_fsdp.py::test_gradients_are_those_of_fully_shard",
        "tests/attach/test_fsdp_sparse.py::test_replicas_stay_equal_to_the_bit",
        "tests/attach/test_fsdp_local.py::test_a_loaded_run_continues_to_the_bit",
    ),
    "local steps": (
        "tests/attach/test_local_steps.py::test_it_is_what_the_definition_says",
        "tests/attach/test_local_steps.py::test_one_bit_is_resumed_and_resized_with_all_its_errors",
    ),
    "compiled steps": (
        "tests/attach/test_attach.py::test_compiled_model_with_batches",
        "tests/attach/test_attach.py::test_compiled_models_learn_the_same_orders",
        "tests/attach/test_coordinated_hook.py::test_compiled_model",
    ),
}


def make_environment(folder: Path, python: str, torch: str) -> str:
    """Make an environment with a version of torch; return its interpreter."""
    own = Path(shutil.which(python) or python).resolve() == Path(sys.executable).resolve()
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    interpreter = str(folder / "bin" / "python")
    wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    pip += ["--no-cache-dir", "--disable-pip-version-check"]
    more = ["--no-deps", wanted] if own else [wanted, *PACKAGES]
    subprocess.run([*pip, *more], check=True)
    if own:
        (site,) = (folder / "lib").glob("python*/site-packages")
        # Behind what the environment has itself.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if subprocess.run([interpreter, "-c", "import torch"], capture_output=True).returncode:
            # A wheel for GPUs loads their libraries, gigabytes of them, also where there is none.
            subprocess.run([*pip, wanted], check=True)
    return interpreter


def run_suite(interpreter: str, report: Path) -> dict[str, str]:
    """Run the suite in an environment; return what became of each part."""
    names = [name for part in SUITE.values() for name in part]
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Advice of torch about an interpreter (Python 3.13.0), which would fail the suite as a warning.
    command += ["-W", "ignore:Guards may run slower:RuntimeWarning"]
    paths = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    log = report.with_suffix(".log")
    with log.open("w") as out:
        subprocess.run(
            [*command, *names],
            cwd=ROOT,
            env=os.environ | paths,
            stdout=out,
            stderr=out,
            check=False,
        )
    if not report.exists():
        return dict.fromkeys(SUITE, f"not run: {(log.read_text().strip() or '-').splitlines()[-1]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcome = {}
    for part, wanted in SUITE.items():
        own = [case for case in cases if _name(case) in wanted]
        bad = [
            case
            for case in own
            if case.find("failure") is not None or case.find("error") is not None
        ]
        found = {_name(case) for case in own}
        refusals = {_refusal(case) for case in bad}
        if bad and None not in refusals and len(bad) == len(own):
            outcome[part] = f"refused: {', '.join(sorted(filter(None, refusals)))}"
        elif bad:
            outcome[part] = (
                f"{len(bad)} of {len(own)} fail: {', '.join(sorted(set(map(_name, bad))))}"
            )
        elif found != set(wanted):
            outcome[part] = f"not run: {', '.join(sorted(set(wanted) - found))}"
        else:
            outcome[part] = f"{len(own)} pass"
    return outcome


def _refusal(case: ElementTree.Element) -> str | None:
    """Return what a test says that this version of torch lacks, if that is why it failed."""
    text = "".join(part.text or "" for part in case)
    found = re.search(r"(torch \S+ has no \S+), which gradherd needs", text)
    return None if found is None else found.group(1)


def _name(case: ElementTree.Element) -> str:
    """Return the name of a test as pytest takes it, without parameters."""
    file = case.attrib["classname"].replace(".", "/") + ".py"
    return f"{file}::{case.attrib['name'].partition('[')[0]}"


def version_row(python: str, torch: str, keep: Path | None) -> list[str]:
    """Return a row of the table: versions, then what became of each part."""
    with tempfile.TemporaryDirectory(prefix="gradherd-versions-") as name:
        folder = Path(name)
        try:
            interpreter = make_environment(folder / "env", python, torch)
        except subprocess.CalledProcessError as error:
            return [python, torch, *[f"not installed: exit code {error.returncode}"] * len(SUITE)]
        asked = "import platform, torch; print(platform.python_version(), torch.__version__)"
        said = subprocess.run(
            [interpreter, "-c", asked], capture_output=True, text=True, check=False
        )
        if said.returncode:
            reason = said.stderr.strip().splitlines()[-1]
            return [python, torch, *[f"torch does not load: {reason}"] * len(SUITE)]
        outcome = run_suite(interpreter, folder / "report.xml")
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "report.log", keep / f"{torch}-{Path(python).name}.log")
        return [*said.stdout.split(), *outcome.values()]


def main() -> int:
    """Run the suite in all environments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="2.7,2.9,2.11,2.13,newest")
    parser.add_argument("--python", default=sys.executable, help="interpreters, by commas")
    parser.add_argument("--out", type=Path, help="file for the table; rows are added as they come")
    parser.add_argument("--logs", type=Path, help="folder for what pytest printed")
    args = parser.parse_args()
    lines = ["| Python | torch | " + " | ".join(SUITE) + " |", "|---" * (len(SUITE) + 2) + "|"]
    fails = False
    for python in args.python.split(","):
        for torch in args.torch.split(","):
            row = version_row(python, torch, args.logs)
            fails = fails or not all(re.search(" pass$|^refused", cell) for cell in row[2:])
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
            if args.out is not None:
                args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
