"""Losses by epoch, epochs by source and events of a run."""

from typing import Any

from weft.runs.logbook import MAX_EPOCH_ROWS, epoch_table, event_table, source_table


def line(step: int, epoch: float, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "loss": loss, "tokens": 100 * step}


def test_epochs_have_a_mean_loss_and_the_last_evaluation_and_many_are_thinned() -> None:
    metrics = [line(1, 0.5, 4.0), line(2, 1.0, 2.0), {"step": 2, "validation_loss": 3.5}, line(3, 1.5, 1.0)]
    assert epoch_table(metrics).rows == [
        ("1", "2", "3.000", "3.500", "+0.500"),
        ("1.50", "3", "1.000", "3.500", "+2.500"),
    ]
    rows = epoch_table([line(n, float(n), 1.0) for n in range(1, 501)]).rows
    assert len(rows) <= MAX_EPOCH_ROWS + 1 and rows[-1][0] == "500"
    assert epoch_table([]).rows == [] and epoch_table([{"step": 1, "loss": None, "epoch": 0.1}]).rows == []


def test_epochs_of_sources_follow_from_their_weights() -> None:
    sources = [{"name": "large", "tokens": 10_000, "weight": 1.0}, {"name": "small", "tokens": 100, "weight": 3.0}]
    rows = source_table(sources, [line(20, 1.0, 1.0)]).rows
    assert [row[0::4] for row in rows] == [("large", "0.05"), ("small", "15.00")]
    assert source_table(sources[:1], [line(20, 1.0, 1.0)]).rows == []


def test_events_are_in_order_of_their_steps() -> None:
    table = event_table([{"step": 40, "to": 20, "rate": 0.5}], [7, 50], [{"step": 45}])
    assert [row[:2] for row in table.rows] == [
        ("7", "update discarded"),
        ("40", "rollback"),
        ("45", "resumed"),
        ("50", "update discarded"),
    ]
    assert table.remarks == ["rollbacks 1, discarded updates 2, resumed 1 times"]
