"""Write docs/evidence.md, a page per study and their charts: `python -m studies.evidence`.

They are made of studies/*.toml and benchmarks/results alone. Runs in the folder that holds these.
"""

import sys
from pathlib import Path

from studies.evidence.summary import write_evidence


def main() -> None:
    """Write all pages and print the verdicts; end with one line if a file is wrong."""
    try:
        evidence = write_evidence(Path())
    except ValueError as error:
        sys.exit(f"studies.evidence: {error}")
    for study, ids in evidence.unmeasured.items():
        print(f"not measured yet: {study}: {', '.join(ids)}", file=sys.stderr)
    for verdict in evidence.verdicts:
        print(f"{verdict.verdict:16}  {verdict.claim.id}: {verdict.ours}")
    waiting = sum(len(ids) for ids in evidence.unmeasured.values())
    print(
        f"{len(evidence.verdicts)} claims measured, {waiting} not yet: {list(evidence.files)[-1]}"
    )


if __name__ == "__main__":
    main()
