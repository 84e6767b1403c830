import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import write_results
from gradherd.lab.study.run import current_results, plan_runs
from studies.evidence.__main__ import main
from studies.evidence.summary import IMAGES, PAGE, PAGES, RESULTS, build_evidence, write_evidence
from tests.lab.report.sample_studies import STUDY, result

ROOT = Path(__file__).parents[2]


SMALL = PAGES / "small.md"
SUMMARY = """\
# In short
{{ totals }} {{ figure("one") }} {{ studies }}
{{ row("It is less", "one") }}
{{ effects("Loss", "%", {"one": "digits", "later": "none"}) }}
{{ picture("small", 1, "Smaller") }}
"""


def test_pages_are_made_of_records_alone(root):
    first, second = build_evidence(root), build_evidence(root)
    assert first.files == second.files and len(first.verdicts) == 1
    images = {path.name for path in first.files if path.parent == IMAGES}
    assert images == {"small.svg", "small-2.svg"} and list(first.files)[-1] == PAGE
    page = first.files[SMALL]
    assert page.startswith("# A &lt;study>\n") and "Made-up 3000" in page
    assert "![Late loss](../images/evidence/small-2.svg)" in page


def test_without_a_template_the_summary_lists_the_studies(root):
    for page, here in ((PAGE, "evidence/"), (PAGES / "README.md", "")):
        lines = build_evidence(root).files[page].splitlines()
        assert f"| [A &lt;study>]({here}small.md) | 0 / 0 / 1 / 0 |  |" in lines
    own = STUDY.replace('source = "s"', 'source = "ours"')
    (root / "studies" / "small.toml").write_text(own)
    lines = build_evidence(root).files[PAGE].splitlines()
    assert "| [A &lt;study>](evidence/small.md) |  | 0 / 0 / 1 / 0 |" in lines


def test_rows_are_short_and_details_are_folded(root):
    """Our own claims were never made on another budget."""
    own = STUDY[STUDY.index("[[claim]]") :].replace('"one"', '"two"').replace('"s"', '"ours"')
    text = STUDY.replace('title = "A', 'budget = "4 epochs of 90"\ntitle = "A', 1)
    (root / "studies" / "small.toml").write_text(text + own)
    shown, folded, _ = build_evidence(root).files[SMALL].split("<details")
    assert "| 1 | less | p | 0.00&nbsp;% more | not&nbsp;confirmed |" in shown.splitlines()
    rows = [line for line in folded.splitlines() if line.startswith(("1. ", "2. "))]
    assert ["4 epochs of 90" in row for row in rows] == [True, False]
    assert all("--only 'cd-grab, few' 'd-rr, few' --out again/small`" in row for row in rows)


def test_a_page_folds_every_arm_and_all_but_the_first_paragraph_of_the_note(root):
    text = STUDY.replace(
        'title = "A',
        'note = "First | words.\\n\\nMore\\nwords.\\n\\nLast."\nleft_out = "Some."\ntitle = "A',
        1,
    )
    (root / "studies" / "small.toml").write_text(text)
    shown, _, arms, more = build_evidence(root).files[SMALL].split("<details")
    assert "First \\| words." in shown and "words.\n\nLast." not in shown
    assert "\n\nMore words.\n\nLast.\n\n</details>\n\n## Left out\n\nSome.\n" in more
    rows = [line.split(" | ")[:3] for line in arms.splitlines() if line.startswith("| ")]
    assert rows == [
        ["| arm", "seeds", "epochs"],
        ["| d-rr, few", "3", "4"],
        ["| cd-grab, few", "3", "4"],
    ]


def test_an_arm_that_was_stopped_is_read_where_all_its_runs_have_been(root):
    runs = plan_runs(read_study(root / "studies" / "small.toml"), ["cd-grab, few"], [0, 1])
    cut = [
        replace(result(run.arm, run.seed, losses), settings=run.settings, status=status)
        for run, losses, status in zip(
            runs, ([2.0, 1.5, 1.0], [2.0, 1.25]), ("stopped", "stopped"), strict=True
        )
    ]
    write_results(root / RESULTS / "small", "small", "compare", cut)
    page = build_evidence(root).files[SMALL]
    (row,) = (line for line in page.splitlines() if line.startswith("| cd-grab, few |"))
    _, seeds, epochs, _, loss, _ = row.strip("| ").split(" | ")
    assert (seeds, epochs, loss) == ("2", "2", "1.38 ± 0.18")


def test_a_template_gives_the_words_and_records_the_figures(root):
    later = STUDY[STUDY.index("[[claim]]") :].replace('"one"', '"later"')
    later = later.replace('"train_loss"', '"padding"')  # dense runs have none
    (root / "studies" / "small.toml").write_text(STUDY + later)
    (root / "studies" / "summary.j2").write_text(SUMMARY)
    files = write_evidence(root).files
    page = files[PAGE]
    link = "(evidence/small.md)"
    assert f"[0.00&nbsp;% more]{link} 1\n" in page and "1 claim from papers: 0 confirmed" in page
    assert f"| It is less | p | [0.00&nbsp;% more]{link} | not&nbsp;confirmed |" in page
    assert '<img src="images/evidence/small.svg" alt="Smaller" width="66%">' in page
    effects = files[IMAGES / "summary-1.svg"]
    assert ">digits<" in effects and ">none<" not in effects
    # Pages and pictures that are no longer made go; what others put there stays.
    (root / PAGES / "gone.md").write_text(files[SMALL])
    (root / PAGES / "mine.md").write_text("by hand\n")
    (root / IMAGES / "summary-7.svg").write_text("<svg/>")
    write_evidence(root)
    assert {path.name for path in (root / PAGES).iterdir()} == {"small.md", "README.md", "mine.md"}
    assert not (root / IMAGES / "summary-7.svg").exists()


@pytest.mark.parametrize(
    "text, says",
    [
        ('{{ figure("two") }}', "summary.j2: there is no claim 'two' in the studies"),
        ('\n{{ figure("one" }}', "summary.j2, line 2: unexpected '}'"),
        ("{{ figures }}", "summary.j2: 'figures' is undefined"),
        ('{{ picture("small", 3, "t") }}', "summary.j2: small has no figure 3"),
        ("{{ ''.__class__.__mro__ }}", "summary.j2: access to attribute '__class__'"),
    ],
)
def test_a_template_that_is_wrong_is_named(root, text, says):
    (root / "studies" / "summary.j2").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        build_evidence(root)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('theme = "ordering"', 'theme = "odd"', "unknown theme 'odd'; known are ordering, open,"),
        ("[sources]", '[sources]\nlr = "ours"', "[sources] names lr, which nothing sets"),
        ('epochs = "', '# "', "[sources] must say where epochs comes from"),
    ],
)
def test_a_page_needs_a_theme_and_a_source_for_each_setting(root, old, new, says):
    assert old in STUDY
    (root / "studies" / "small.toml").write_text(STUDY.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(f"small.toml: {says}")):
        build_evidence(root)


def test_results_of_other_settings_do_not_count(root):
    text = STUDY.replace("epochs = 4", "epochs = 5", 1)
    (root / "studies" / "small.toml").write_text(text)
    found = build_evidence(root)
    assert (found.verdicts, found.unmeasured) == ([], {"small": ["one"]})
    assert list(found.files) == [SMALL, PAGES / "README.md", PAGE]
    assert "1 claim not measured yet" in found.files[PAGE]


def test_a_claim_without_a_verdict_says_what_is_missing_and_why(root):
    claim = STUDY[STUDY.index("[[claim]]") :]
    late = claim.replace('"one"', '"late"').replace('test = "', 'epoch = 4\ntest = "', 1)
    text = STUDY.replace('title = "A', 'left_out = "No | time."\ntitle = "A', 1) + late
    (root / "studies" / "small.toml").write_text(text)
    cut = [
        replace(result(run.arm, run.seed, [2.0, 1.5]), settings=run.settings, status="stopped")
        for run in plan_runs(read_study(root / "studies" / "small.toml"), ["d-rr, few"])
    ]
    write_results(root / RESULTS / "small", "small", "compare", cut)
    page = build_evidence(root).files[SMALL]
    stopped = "`d-rr, few` was stopped after 2 of 4 epochs"
    # Also the claim that names no epoch: it is about the end.
    row = f"|  | less | p | {stopped} | not measured [why](#left-out) |"
    assert page.splitlines().count(row) == 2
    assert "## Left out\n\nNo \\| time.\n" in page
    for path in (root / RESULTS / "small").iterdir():
        path.unlink()
    page = build_evidence(root).files[SMALL]
    assert "none has been run" in page and "<details" not in page
    assert page.count("no run of `cd-grab, few` and `d-rr, few`") == 2


def test_the_command_writes_the_pages_and_says_the_verdicts(root, capsys, monkeypatch):
    monkeypatch.chdir(root)
    later = STUDY[STUDY.index("[[claim]]") :].replace('"one"', '"later"')
    later = later.replace('"train_loss"', '"padding"')  # dense runs have none
    (root / "studies" / "small.toml").write_text(STUDY + later)
    main()
    out, err = capsys.readouterr()
    assert (
        err == "not measured yet: small: later\n" and "not confirmed     one: train_loss: 1" in out
    )
    assert out.endswith("1 claims measured, 1 not yet: docs/evidence.md\n")
    (root / "studies" / "small.toml").write_text(STUDY.replace('y = "train_loss"', 'y = "odd"', 1))
    with pytest.raises(SystemExit, match=r"small\.toml: unknown y of figure Loss 'odd'; known are"):
        main()
    (root / "studies" / "small.toml").unlink()
    with pytest.raises(SystemExit, match="holds no study; run this in the folder that holds"):
        main()


def test_a_claim_is_told_once(root):
    (root / "studies" / "other.toml").write_text(STUDY)
    with pytest.raises(ValueError, match="claim one is already in"):
        build_evidence(root)


def test_the_pages_in_the_tree_are_what_their_records_give():
    evidence = build_evidence(ROOT)
    made = evidence.files
    for name in evidence.unmeasured:
        assert "## Left out" in made[PAGES / f"{name}.md"], f"studies/{name}.toml: no left_out"
    for path, text in made.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, (
            f"{path} is out of date: python -m studies.evidence"
        )
    for folder, kind in ((IMAGES, "*.svg"), (PAGES, "*.md")):
        there = {path.relative_to(ROOT) for path in (ROOT / folder).glob(kind)}
        assert there == {path for path in made if path.parent == folder}
    # One screen of 1400 x 1000 pixels: more than this did not fit when it was looked at.
    assert made[PAGE].count("<img ") == 2
    assert made[PAGE].count("\n| ") <= 15 and len(made[PAGE]) < 6000


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.toml")), ids=lambda p: p.stem)
def test_runs_of_a_study_are_on_its_page(path, tmp_path):
    """What is planned fits the file; what had other settings does not."""
    study = read_study(path)
    for piece in plan_runs(study, seeds=study.seeds[:1]):
        made = replace(result(piece.arm, piece.seed, [1.0]), settings=piece.settings)
        write_results(tmp_path / "ours", study.name, study.kind, [made])
        other = replace(made, settings={**piece.settings, "limit": 7, "dim": 7})
        write_results(tmp_path / "other", study.name, study.kind, [other])
    assert list(current_results(study, tmp_path / "ours")) == list(study.arms)
    assert current_results(study, tmp_path / "other") == {}
