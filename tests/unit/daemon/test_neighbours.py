"""What the nodes table tells a daemon of others: freshness by beats and our own clock, twins by age."""

from __future__ import annotations

from daemon.neighbours import FRESH_SECONDS, Neighbours
from kvlog.ids import NodeId
from kvlog.log.base import TableRow
from kvlog.wire.tables import NodeRow, encode_row

SESSION = 77


def heard(node: str, beat: int, *, incarnation: str = "01", leaving: bool = False) -> TableRow:
    """A heartbeat of a node that is busy with SESSION."""
    row = NodeRow(node=node, incarnation=incarnation, beat=beat, leaving=leaving, busy=(SESSION,))
    return TableRow(node.encode(), encode_row(row))


def ours() -> Neighbours:
    """The view of node `a`, which has read the table once, and nothing was there."""
    view = Neighbours(NodeId("a"), "00")
    view.look([], 0.0, own_beat=0)
    return view


def test_neighbour_that_beats_is_busy_until_it_has_been_silent() -> None:
    """A row that does not change says nothing any more, whatever it said."""
    view = ours()
    view.look([heard("b", 1)], 10.0, own_beat=1)
    assert view.is_busy("b", SESSION, 10.0)
    assert not view.is_busy("b", SESSION + 1, 10.0)
    assert not view.is_busy("c", SESSION, 10.0)
    view.look([heard("b", 1)], 10.0 + FRESH_SECONDS, own_beat=2)
    assert not view.is_busy("b", SESSION, 10.0 + FRESH_SECONDS)
    view.look([heard("b", 2)], 20.0, own_beat=3)
    assert view.is_busy("b", SESSION, 20.0)


def test_neighbour_known_from_history_only_is_not_busy() -> None:
    """What stood in the table at our start may be a dead node's last word."""
    view = Neighbours(NodeId("a"), "00")
    view.look([heard("b", 5)], 0.0, own_beat=0)
    assert not view.is_busy("b", SESSION, 0.0)
    view.look([heard("b", 6)], 1.0, own_beat=1)
    assert view.is_busy("b", SESSION, 1.0)


def test_neighbour_that_leaves_is_not_busy() -> None:
    """A goodbye ends it at once."""
    view = ours()
    view.look([heard("b", 1)], 1.0, own_beat=1)
    view.look([heard("b", 2, leaving=True)], 1.1, own_beat=2)
    assert not view.is_busy("b", SESSION, 1.1)


def test_older_twin_that_goes_on_beating_is_told_after_three_beats() -> None:
    """Two daemons under one name: the later one finds out."""
    view = ours()
    for beat in range(100, 103):
        view.look([heard("a", beat)], float(beat), own_beat=beat - 99)
        assert view.twin is None
    view.look([heard("a", 103)], 103.0, own_beat=4)
    assert "01" == view.twin


def test_younger_twin_is_its_own_trouble() -> None:
    """The first one goes on."""
    view = ours()
    for beat in range(1, 20):
        view.look([heard("a", beat)], float(beat), own_beat=beat + 100)
    assert view.twin is None


def test_twins_of_one_age_agree_which_of_them_goes() -> None:
    """Both started at once: the incarnation decides, for both the same way."""
    views = (Neighbours(NodeId("a"), "00"), Neighbours(NodeId("a"), "01"))
    for beat in range(10):
        views[0].look([heard("a", beat, incarnation="01")], float(beat), own_beat=beat)
        views[1].look([heard("a", beat, incarnation="00")], float(beat), own_beat=beat)
    assert ["01", None] == [view.twin for view in views]


def test_own_heartbeats_of_an_earlier_life_are_no_twin() -> None:
    """A compacted topic may hold many of them, and they come one at a time; but they have an end."""
    view = Neighbours(NodeId("a"), "00")
    view.look([heard("a", beat) for beat in range(90, 100)], 0.0, own_beat=0)
    for beat in range(1, 10):
        view.look([heard("a", 99)], float(beat), own_beat=beat)
    assert view.twin is None


def test_junk_in_the_table_is_passed_over() -> None:
    """It is only a hint: rows of newer builds, of nobody, or under another's key change nothing."""
    view = ours()
    strange = [TableRow(b"b", b"junk"), TableRow(b"\xff", None), TableRow(b"c", heard("b", 3).value)]
    view.look(strange, 1.0, own_beat=1)
    assert not view.is_busy("b", SESSION, 1.0)
