"""The README's table of figures, from the benchmarks' own last lines.

    benchmarks/run | tee -a docs/measurements.jsonl      (as root; the machine otherwise idle)
    benchmarks/run table

docs/measurements.jsonl keeps every run that was published; the table shows the newest of
each benchmark. A test holds the README to it, so no figure is edited by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MEASUREMENTS = REPOSITORY / "docs/measurements.jsonl"
README = REPOSITORY / "README.md"
BEGIN, END = "<!-- figures:begin -->\n", "<!-- figures:end -->"

# benchmark, key, what it is, unit
ROWS = (
    ("floor_latency", "p50_ms", "first call after idle → min_freq written, median", "ms"),
    ("floor_latency", "p99_ms", "the same, 99th percentile", "ms"),
    ("floor_latency", "busy_p50_ms", "the same with every core busy, median", "ms"),
    ("floor_latency", "busy_p99_ms", "the same with every core busy, 99th percentile", "ms"),
    ("floor_latency", "poller_p50_ms", "beside it: a poller that looks every 100 ms, median", "ms"),
    ("floor_latency", "bpftrace_p50_ms", "beside it: bpftrace into a pipe, median", "ms"),
    ("floor_latency", "bpftrace_p99_ms", "the same, 99th percentile", "ms"),
    ("probe_cost", "call_us", "added time of a call, entry and return", "µs"),
    ("probe_cost", "call_us_uretprobe", "the same with `watch.returns: uretprobe`", "µs"),
    ("probe_cost", "loss_percent", "llama-bench: decode speed lost", "%"),
    ("probe_cost", "loss_uncertainty_percent", "uncertainty of that (±)", "%"),
    ("probe_cost", "tokens_per_s", "at this many tokens a second", ""),
    ("footprint", "pss_mib", "the daemon's memory (PSS)", "MiB"),
    ("footprint", "anon_mib", "of it anonymous", "MiB"),
    ("footprint", "idle_wakeups_per_s", "wake-ups a second, idle", ""),
    ("footprint", "cpu_percent_at_100", "of one core at 100 calls a second", "%"),
    ("expert_cache", "decode_ratio", "expert cache, 4 GiB model under 2 GiB: decode, × stock", ""),
    ("expert_cache", "prefill64_ratio", "the same, prefill of 64 tokens, × stock", ""),
    ("expert_cache", "prefill512_ratio", "the same, prefill of 512 tokens, × stock", ""),
    ("expert_cache", "bound_share", "the same, share of the speed that nothing could beat", ""),
    ("expert_cache", "fits_decode_ratio", "a model that fits: decode, × stock", ""),
    ("expert_cache", "fits_prefill_ratio", "the same, prefill of 512 tokens, × stock", ""),
    ("expert_cache", "large_experts_ratio", "few large experts, 21 % cached: decode, × stock", ""),
    ("expert_cache", "uring_cpu_s_per_gib", "processor seconds to read 1 GiB, io_uring", "s"),
    ("expert_cache", "pool_cpu_s_per_gib", "the same with threads", "s"),
)


def newest(lines: list[str]) -> dict[str, dict[str, Any]]:
    """The last measurement of each benchmark; a run of a part leaves the others' figures."""
    results: dict[str, dict[str, Any]] = {}
    for result in map(json.loads, lines):
        before = results.get(result["name"], {}).get("figures", {})
        results[result["name"]] = {**result, "figures": {**before, **result["figures"]}}
    return results


def table(lines: list[str]) -> str:
    """Markdown; a figure that no run has is left out."""
    results = newest(lines)
    rows = ["| what | figure | script |", "|---|---|---|"]
    for name, key, text, unit in ROWS:
        value = results.get(name, {}).get("figures", {}).get(key)
        if value is not None:
            rows.append(f"| {text} | {value:g} {unit}".rstrip() + f" | `benchmarks/{name}` |")
    machines = {f"{r['machine']}, {r['date'][:10]}" for r in results.values()}
    return "\n".join([*rows, "", *(f"({machine})" for machine in sorted(machines))]) + "\n"


def fill(readme: str, lines: list[str]) -> str:
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table(lines) + END + tail


def main() -> int:
    lines = [line for line in MEASUREMENTS.read_text().splitlines() if line.startswith("{")]
    README.write_text(fill(README.read_text(), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
