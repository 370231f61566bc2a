"""What no benchmark can be asked for is one clear error, before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ec_p2p.cli import bench, bench_instances, build_parser, main

SIZES = "accepted, separated by commas: a positive number of bytes, or text like '512MiB'"


@pytest.mark.parametrize(
    ("what", "option", "value", "accepted"),
    [
        *(
            (what, "--sizes", value, SIZES)
            for what in ("fetch", "engine")
            for value in ("64KiB,lots", "64KiB,,1MiB", "", "0", "-1", "1e9", "1" * 5000)
        ),
        ("engine", "--sizes", "64KiB,16383", f"{SIZES}, at least 16KiB"),
        *(
            (what, "--repeat", value, "accepted: a number from 1 to 1000000")
            for what in ("fetch", "engine")
            for value in ("0", "-1", "1.5", "", "x", "1000001", "1" * 5000)
        ),
        *(
            ("engine", "--index-keys", value, "accepted: a number from 0 to 100000000")
            for value in ("-1", "x", "100000001")
        ),
        ("engine", "--folder", "/nonexistent", "accepted: a folder to write to (No such file or directory)"),
        ("engine", "--folder", "/dev/null", "accepted: a folder to write to (Not a directory)"),
        *(
            ("fetch", "--items", value, "accepted: numbers from 1 to 256, separated by commas")
            for value in ("0", "1,,4", "-1", "1,257", "\u00b2", "1" * 5000)
        ),
        *(
            ("directory", "--instances", value, "accepted: numbers from 1 to 1000000000, separated by commas")
            for value in ("", "0", "1,x", "-3", "1" * 5000)
        ),
        *(
            ("policy", option, value, "accepted: a number from 1 to 1000000")
            for option in ("--requests", "--items")
            for value in ("0", "-1", "x", "1000001")
        ),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(
    capsys: pytest.CaptureFixture[str], what: str, option: str, value: str, accepted: str
) -> None:
    assert main(["bench", what, f"{option}={value}"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"ec-p2p: {option}={value!r}; ")
    assert accepted in error


@pytest.mark.parametrize(
    ("what", "option", "value", "needed"),
    [
        ("fetch", "--sizes", "64KiB,256MiB", "1.5 GiB"),
        ("engine", "--sizes", "64KiB,256MiB", "5.0 GiB"),
        ("engine", "--index-keys", "2097152", "2.0 GiB"),
    ],
)
def test_what_memory_cannot_hold_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    option: str,
    value: str,
    needed: str,
) -> None:
    monkeypatch.setattr(bench, "free_memory", lambda: 1400 << 20)
    assert main(["bench", what, f"{option}={value}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ec-p2p: {option}={value!r} takes {needed} of memory; ")
    assert "accepted: what fits the 1.4 GiB that are free" in error


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fetch", ["(default: nixl)", "(default: 1)", "(default: host)", "(default: 64KiB,1MiB,4MiB,16MiB,64MiB)"]),
        ("fetch", ["(default: 60)", "raw READ ", "node fetch ", "client want ", "want to ", "memcpy ", "fetch/raw "]),
        ("engine", ["(default: 64KiB,1MiB,4MiB,16MiB,64MiB)", "(default: 60)", "(default: 1000000)"]),
        ("engine", ["put, get ", "borrow ", "disk_write ", "disk_read ", "limit ", "ratio "]),
        ("directory", ["snapshot s ", "lookup us ", "visible ms ", *bench_instances._COLUMNS.values()]),
        ("policy", ["(default: 30000)", "(default: 5000)"]),
    ],
)
def test_the_help_has_defaults_and_columns(capsys: pytest.CaptureFixture[str], what: str, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", what, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert [word for word in words if word not in text] == []


def test_the_documentation_has_each_option_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    documented = {
        (what, option, default.strip("`"))
        for whats, option, default in re.findall(r"^\| ([`\w, ]+) \| `(--[\w-]+)` \| ([^|]+) \|", text, re.M)
        for what in re.findall(r"\w+", whats)
    }
    options = set()
    for what in ("fetch", "engine", "directory", "policy"):
        args = vars(build_parser().parse_args(["bench", what]))
        options |= {
            (what, f"--{name.replace('_', '-')}", value) for name, value in args.items() if name not in ("run", "json")
        }
    without = {None: "none", False: "off"}
    in_words = {("engine", "--folder"): "that of temporary files"}
    assert {
        (what, option, in_words.get((what, option), without.get(value, value))) for what, option, value in options
    } == documented
