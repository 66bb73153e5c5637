"""Turns the journal of a run into JSON, a Markdown page and a section for RESULTS.md.

A row that was measured again replaces the earlier one. Shares of bandwidth are relative to a copy on the same card in
the same run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown

from forerun.store import Journal

Row = Mapping[str, Any]
KEYS = {
    "card": (), "tests": ("test",), "products": ("format", "matrix", "rows"),
    "tiles": ("format", "matrix", "rows", "tile"),
    "experts": ("format", "rows"),
    "attention": ("kind", "sequences", "rows", "context"), "row_work": ("kernel", "rows"),
    "profile": ("format", "kernel"), "steps": ("format", "tokens"), "texts": ("format", "length"),
    "gaps": ("format", "ahead"),
    "family": ("engine", "format", "draft", "depth", "temperature", "batch"),
    "requests": ("format", "draft", "nodes", "width", "parameters", "batch"),
    "unseen": ("format", "mode", "batch", "depth"),
}  # fmt: skip
BEFORE = "## Simulated machines"  # the section of RESULTS.md before which a new one is inserted


def tables_of(folder: Path) -> dict[str, list[Row]]:
    """The journal's rows by table; the table `parts` has the final state of each part."""
    tables: dict[str, dict[Any, Row]] = {name: {} for name in ("parts", *KEYS)}
    for entry in Journal.read(folder / "rows.jsonl").entries:
        if isinstance(entry, dict) and "end" in entry:
            tables["parts"][entry["end"]] = entry
        elif isinstance(entry, dict) and entry.get("table") in KEYS:
            tables[entry["table"]][tuple(entry.get(key) for key in KEYS[entry["table"]])] = entry
    return {name: list(rows.values()) for name, rows in tables.items()}


def write_report(folder: Path) -> None:
    """Write `report.json` and `report.md` from the rows that the journal has now."""
    tables = tables_of(folder)
    (folder / "report.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(
        f"# A run of `scripts/gpu`\n\n{states(tables)}\n{section(tables)}", encoding="utf-8"
    )


def states(tables: Mapping[str, Sequence[Row]]) -> str:
    """The table of parts, with the state and the duration of each."""
    return table(("part", "state", "seconds"), tables["parts"], lambda p: (p["end"], p["state"], p["seconds"]))


def section(tables: Mapping[str, Sequence[Row]]) -> str:
    """The section for RESULTS.md, with every table that has a row."""
    card = tables["card"][0] if tables["card"] else {}
    speed = card.get("bandwidth_gb_s") or float("nan")
    parts = [f"## {card.get('name', 'An unknown card')}, {card.get('date', '')}", facts(card)]
    parts += [tests(tables["tests"]), *kernels(tables, speed), *passes(tables, speed), family(tables["family"])]
    parts += [requests(tables["requests"]), unseen(tables["unseen"])]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def facts(card: Row) -> str:
    """A paragraph with the commit, the card's properties, the versions and the bandwidth of a copy."""
    if not card:
        return ""
    names = {"driver": "driver", "memory": "memory", "clock": "clock up to", "torch": "torch", "cuda": "CUDA",
             "triton": "Triton", "transformers": "transformers", "python": "Python", "cores": "cores"}  # fmt: skip
    details = ", ".join(f"{word} {card[key]}" for key, word in names.items() if card.get(key))
    commit = f"commit `{card['commit']}`, " if card.get("commit") else ""
    copy = f"A copy moves {card['bandwidth_gb_s']:,.0f} GB/s, counting bytes read and written."
    return f"{commit}sources `{card['sources']}`; {details}. {copy}"


def tests(rows: Sequence[Row]) -> str:
    """The number of tests by outcome, and the message of each failed one."""
    counts = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("passed", "failed", "skipped")}
    failed = [f"- `{row['test']}`: {row.get('said', '')}" for row in rows if row["outcome"] == "failed"]
    outcomes = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return "\n".join([f"`tests/gpu`: {outcomes}.", *[""][: len(failed)], *failed]) if rows else ""


def kernels(tables: Mapping[str, Sequence[Row]], speed: float) -> list[str]:
    """The time of every kernel, next to the time in which the card moves the kernel's bytes at `speed` GB/s."""

    def memory_limit(row: Row) -> tuple[str, str]:
        least_us = row["bytes"] / speed / 1e3
        return f"{least_us:.1f}", f"{least_us / row['us']:.0%}"

    limit = "memory limit, µs", "share of bandwidth"
    return [
        headed("**Matrix products**", table(
            ("format", "matrix", "outputs × inputs", "rows", "time, µs", *limit), tables["products"],
            lambda r: (r["format"], r["matrix"], f"{r['outputs']} × {r['inputs']}", r["rows"], f"{r['us']:.1f}",
                       *memory_limit(r)))),
        headed("**Tiles**: the chosen and the fastest one (fields of `Tile` and `GroupTile` in `tiles.py`)", table(
            ("format", "matrix", "rows", "chosen, µs", "fastest, µs", "fastest tile", "their ratio", "same bits"),
            *fastest_tiles(tables["tiles"]))),
        headed("**Experts** of one layer, from the router's logits to the sum", table(
            ("format", "rows", "experts read", "time, µs", *limit), tables["experts"],
            lambda r: (r["format"], r["rows"], f"{r['num_read']:.1f}", f"{r['us']:.1f}", *memory_limit(r)))),
        headed("**Attention** of one layer", table(
            ("kind", "sequences", "rows", "context", "time, µs", "torch's, µs", *limit, "TFLOP/s"),
            tables["attention"],
            lambda r: (r["kind"], r["sequences"], r["rows"], r["context"], f"{r['us']:.1f}", f"{r['torch_us']:.1f}",
                       *memory_limit(r), f"{r['flops'] / r['us'] / 1e6:.1f}"))),
        headed("**Norms, rotation and activation**", table(
            ("kernel", "rows", "time, µs", *limit), tables["row_work"],
            lambda r: (r["kernel"], r["rows"], f"{r['us']:.1f}", *memory_limit(r)))),
    ]  # fmt: skip


def fastest_tiles(rows: Sequence[Row]) -> tuple[list[Row], Callable[[Row], Sequence[Any]]]:
    """The row of the fastest tile of each case, and the function that compares it with the chosen tile."""
    by_case: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row["format"], row["matrix"], row["rows"]), []).append(row)

    def cells(r: Row) -> tuple[Any, ...]:
        alike = by_case[r["format"], r["matrix"], r["rows"]]
        chosen = next((other["us"] for other in alike if other["chosen"]), math.nan)
        return (r["format"], r["matrix"], r["rows"], f"{chosen:.1f}", f"{r['us']:.1f}", r["tile"],
                f"{r['us'] / chosen:.2f}", all(other["same"] for other in alike))  # fmt: skip

    return [min(alike, key=lambda row: row["us"]) for alike in by_case.values()], cells


def passes(tables: Mapping[str, Sequence[Row]], speed: float) -> list[str]:
    """Passes of an entire model: their times, the idle time between them, prompts, and kernels."""
    kinds = {True: "with passes ahead", False: "without passes ahead"}
    idle = "; ".join(
        f"{g['format']}, {kinds[g['ahead']]}, {g['idle_us']:.0f} µs in rounds of {g['round_ms']:.2f} ms"
        for g in tables["gaps"]
    )
    return [
        headed("**Passes** of one sequence, with a context of 512 tokens", table(
            ("format", "tokens", "pass, ms", "v(k)", "share of bandwidth", "with the host's work, ms"), tables["steps"],
            lambda s: (s["format"], s["tokens"], f"{s['pass_ms']:.2f}", f"{s['v']:.2f}",
                       f"{s['weight_bytes'] / s['pass_ms'] / 1e6 / speed:.0%}", f"{s['with_host_ms']:.2f}"))),
        f"The GPU is idle between a verdict and the next pass: {idle}." if idle else "",
        headed("**Prefill, and passes with long contexts**", table(
            ("format", "context", "prefill, ms", "pass over 1 token, ms", "pass over 8, ms"), tables["texts"],
            lambda t: (t["format"], t["length"], f"{t['prompt_ms']:.1f}", f"{t['pass_of_1_ms']:.2f}",
                       f"{t['pass_of_8_ms']:.2f}"))),
        headed("**A pass over one token, by kernel**", table(
            ("format", "kernel", "launches", "µs"), tables["profile"],
            lambda p: (p["format"], f"`{p['kernel']}`", f"{p['calls']:.0f}", f"{p['us']:.0f}"))),
    ]  # fmt: skip


def family(rows: Sequence[Row]) -> str:
    """Tokens per second, and the ratio over plain decoding with the same engine and format."""
    plain = {
        (r["engine"], r["format"], r["temperature"], r["batch"]): r["tokens_per_s"]
        for r in rows
        if r["draft"] == "plain"
    }

    def cells(r: Row) -> tuple[Any, ...]:
        base = plain.get((r["engine"], r["format"], r["temperature"], r["batch"]))
        ratio = f"×{r['tokens_per_s'] / base:.2f}" if base else ""
        rounds = "" if r["tokens_per_round"] is None else f"{r['tokens_per_round']:.2f}"
        same = "" if r["same_as_plain"] is None else f"{r['same_as_plain']} of {r['batch']}"
        return (r["engine"], r["format"], r["draft"], r["depth"] or "", r["temperature"], r["batch"],
                f"{r['tokens_per_s']:.0f}", ratio, rounds, r.get("captures", ""), same)  # fmt: skip

    names = ("engine", "format", "draft", "depth", "temperature", "batch", "tokens/s", "over plain", "tokens per round",
             "captures", "answers equal to plain's")  # fmt: skip
    return headed("**The bundled family**, its target widened to 1 B parameters", table(names, rows, cells))


def requests(rows: Sequence[Row]) -> str:
    """Tokens per second by sampling parameters, and the ratio over the temperature alone with the same drafts."""
    usual = {(r["draft"], r["nodes"], r["width"]): r["tokens_per_s"] for r in rows if r["parameters"] == "temperature"}

    def cells(r: Row) -> tuple[Any, ...]:
        base = usual.get((r["draft"], r["nodes"], r["width"]))
        ratio = f"×{r['tokens_per_s'] / base:.2f}" if base else ""
        return (r["format"], r["draft"], r["nodes"], r["width"], r["parameters"], r["batch"],
                f"{r['tokens_per_s']:.0f}", ratio, f"{r['tokens_per_round']:.2f}", r["captures"],
                f"{r['reserved_mb']:.0f}")  # fmt: skip

    names = ("format", "draft", "draft tokens", "width", "parameters", "batch", "tokens/s", "over temperature alone",
             "tokens per round", "captures", "memory reserved since the start, MB")  # fmt: skip
    return headed("**Sampling parameters and trees**, of the bundled family", table(names, rows, cells))


def unseen(rows: Sequence[Row]) -> str:
    """Round times in the modes of `unseen.py`, and their ratios over the mode `unseen`."""
    usual = {(r["format"], r["batch"], r["depth"]): r["round_ms"] for r in rows if r["mode"] == "unseen"}

    def cells(r: Row) -> tuple[Any, ...]:
        base = usual.get((r["format"], r["batch"], r["depth"]))
        ratio = "" if base is None or r["mode"] == "unseen" else f"×{r['round_ms'] / base:.3f}"
        more_us = "" if not ratio or base is None else f"{(r['round_ms'] - base) * 1e3:+.0f}"
        return (r["format"], r["batch"], r["depth"], r["mode"], f"{r['round_ms']:.3f}", ratio, more_us,
                f"{r['tokens_per_round']:.2f}", f"{r['tokens_per_s']:.0f}", "yes" if r["same"] else "no")  # fmt: skip

    names = ("format", "batch", "depth", "mode", "round, ms", "time over unseen", "difference, µs", "tokens per round",
             "tokens/s", "same tokens")  # fmt: skip
    head = "**Draft tokens that the host does not see** (`unseen`), waits for (`waited`) or passes on (`seen`)"
    return headed(f"{head}, of the bundled family widened to 1 B parameters", table(names, rows, cells))


def headed(head: str, body: str) -> str:
    """A table below its name; an empty string if the table has no rows."""
    return f"{head}\n\n{body}" if body else ""


def table(names: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[Any]]) -> str:
    """A Markdown table; an empty string if there are no rows."""
    return markdown.table(names, map(cells, rows)) if rows else ""


def insert(results: Path, text: str) -> None:
    """Insert a section into RESULTS.md; it replaces a section with the same heading."""
    page, heading = results.read_text(encoding="utf-8"), text.partition("\n")[0] + "\n"
    begin = page.find("\n" + heading) + 1 or page.index("\n" + BEFORE) + 1
    after = page.find("\n## ", begin) + 1 if page.startswith(heading, begin) else begin
    results.write_text(page[:begin] + text + "\n" + page[after or len(page) :], encoding="utf-8")
