"""What the numbers of a comparison say, in plain sentences: made from the rows, never prettier than they."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal

from recsys_basis.report.comparison import Judging, VariantRow

ENOUGH_SEEDS = 5


def headlines(rows: Sequence[VariantRow], judging: Judging) -> list[str]:
    """One sentence for each variant but the baseline, and one of caution where seeds are few."""
    baseline = next((row for row in rows if row.variant == judging.baseline), None)
    if baseline is None:
        return [f"No run of {judging.baseline} ended: nothing can be said of the others beside it."]
    sentences = [_about(row, baseline, judging) for row in rows if row is not baseline]
    fewest = min(len(row.seeds) for row in rows)
    if fewest < ENOUGH_SEEDS:
        sentences.append(
            f"Caution: {_count(fewest, 'seed')} of the smallest variant; intervals of fewer than "
            f"{ENOUGH_SEEDS} are rough."
        )
    return sentences


def _about(row: VariantRow, baseline: VariantRow, judging: Judging) -> str:
    if row.auc_difference is None or row.ci_low is None or row.ci_high is None:
        return f"{row.variant} shares no seed with {baseline.variant}: the two are not compared."
    if row.missing_seeds:
        return (
            f"{row.variant} is not judged beside {baseline.variant}, since one or both have no run of "
            f"{_list(row.missing_seeds)}: on {_list(row.paired_seeds)} its AUC differs by "
            f"{row.auc_difference:+.5f} (95 % interval {row.ci_low:+.5f} to {row.ci_high:+.5f}). "
            f"{_size(row, baseline)}"
        )
    return (
        f"{row.variant} is {verdict(row.ci_low, row.ci_high)} {baseline.variant}: AUC {row.auc_mean:.5f} "
        f"against {baseline.auc_mean:.5f}, a difference of {row.auc_difference:+.5f} "
        f"(95 % interval {row.ci_low:+.5f} to {row.ci_high:+.5f}, {_count(len(row.paired_seeds), 'seed')}, "
        f"{row.num_test_rows:,} test rows). {_loss(row, judging)} {_size(row, baseline)}"
    )


def verdict(low: float, high: float) -> str:
    """Of an interval of a difference: an end that is 0 decides nothing."""
    return "better than" if low > 0 else "worse than" if high < 0 else "not told apart from"


def _loss(row: VariantRow, judging: Judging) -> str:
    margin = f"{judging.margin:g} AUC"
    match row.non_inferior, row.delong_non_inferior:
        case True, True:
            return f"It loses less than {margin} by both intervals."
        case True, False:
            return f"It loses less than {margin} by bootstrap, but DeLong's interval does not show that."
        case False, True:
            return f"By DeLong's interval it loses less than {margin}, but the bootstrap does not show that."
        case _:
            return f"That it loses less than {margin} is not shown."


def _size(row: VariantRow, baseline: VariantRow) -> str:
    sizes = f"{decimal(row.optimizer_bytes)} of row state against {decimal(baseline.optimizer_bytes)}"
    if not row.optimizer_bytes or not baseline.optimizer_bytes:
        return f"It keeps {sizes}."
    ratio = baseline.optimizer_bytes / row.optimizer_bytes
    times = f"1/{ratio:.3g}" if ratio > 1 else f"{1 / ratio:.3g} times as much" if ratio < 1 else "as much"
    return f"It keeps {sizes}: {times}."


def _list(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(str(seed) for seed in seeds)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
