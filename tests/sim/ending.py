"""The end of a run: faults stop, everything in flight arrives, and then it must all be well again.

Converged         every reader names the owner that the reference names, and holds what it holds
SessionClaimable  whatever was interrupted where, every node can claim every session and log a turn to its end
NoTurnStuck       no request waits for an answer, and nothing is left half done
BoundedMemory     what a node keeps beside its sessions is gone when its reason is gone
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.core.session import Standing
from kvlog.limits import TINY
from tests.sim.checkers import require
from tests.sim.engine import Phase

if TYPE_CHECKING:
    from kvlog.core.primary import PrimaryCore
    from kvlog.ids import Partition
    from tests.sim.engine import Conversation, Request
    from tests.sim.shell import Shell
    from tests.sim.world import World

CLAIMED_BY_ALL = 1
"""So many sessions are claimed by every node at the end, one after another; the others by one node."""
LAST_PROMPT_MAX = 10
ROUNDS_MAX = 200
"""Far more than a run needs to come to rest: a turn of 40 tokens takes about 30."""
FAR_FUTURE_NS = 1 << 60
"""Beyond every deadline, and twice that beyond every patience that was counted from it."""


def end(world: World) -> None:
    """Drain the run, then claim every session again, and check what is left."""
    world.profile.calm = True
    while world.around.late:
        world.land_late()
    for node in world.nodes:
        node.paused = False
        if node.is_stopping and node.alive:
            node.crash()
        world.restart()
    _come_to_rest(world)
    for node in world.nodes:
        assert node.core is not None, "all nodes were restarted"
        for now_ns in (FAR_FUTURE_NS, 2 * FAR_FUTURE_NS):
            node.carry_out(node.core.tick(now_ns), None)
        waiting = [request for request in node.engine.requests if request.phase is Phase.WAITING]
        require(not waiting, "NoTurnStuck", node.name, "has not answered", len(waiting))
        for request in list(node.engine.requests):
            node.engine.abort(request)
    world.around.now_ns = 2 * FAR_FUTURE_NS
    _come_to_rest(world)
    for node in world.nodes:
        assert node.core is not None, "all nodes were restarted"
        ended = [
            primary for primary in node.core.primaries() if primary.ended and not _may_be_lost(world, primary)
        ]
        require(not ended, "BoundedMemory", node.name, "keeps ended sessions", ended)
    for number, conversation in enumerate(world.conversations):
        nodes = list(world.nodes)
        world.rng.shuffle(nodes)
        for node in nodes if number < CLAIMED_BY_ALL else nodes[:1]:
            _claim(world, node, conversation)
    for node in world.nodes:
        _is_well(world, node)


def _may_be_lost(world: World, primary: PrimaryCore) -> bool:
    """An End that was lost in silence, or with a tail before anybody read it, would show at the next record only."""
    log = world.log.partitions[world.around.partition_of[primary.session]]
    return log.generation > 0 or (primary.session, primary.claim.epoch) in world.checkers.damaged


def _come_to_rest(world: World) -> None:
    for _ in range(ROUNDS_MAX):
        moved = [_round(world, node) for node in world.nodes]
        if not any(moved):
            return
    require(holds=False, checker="NoTurnStuck", text="the run does not come to rest")


def _round(world: World, node: Shell) -> bool:
    """Let everything of one node get on; whether anything did."""
    moved = False
    while node.tell_failure() or node.watermark(calm=True):
        moved = True
    for partition in list(node.outbox):
        while (entry := node.land_next(partition)) is not None:
            world.land(partition, entry)
            moved = True
    assert node.core is not None, "no node dies while the run is drained"
    for partition in list(node.core.partitions):
        while node.read(partition):
            moved = True
    while node.take_rows():
        moved = True
    moved = node.rewriter.step() or moved
    for request in list(node.engine.requests):
        moved = moved or request.phase is not Phase.WAITING
        node.engine.step(request)
    return moved


def _claim(world: World, node: Shell, conversation: Conversation) -> None:
    """A new request of the conversation must be logged to its end, and be what the log then holds."""
    if _has_lost_records(world, node, conversation):  # which shows at its next record only
        _last_request(world, node, conversation)
    where = f"{node.name} {conversation.session}"
    request = _last_request(world, node, conversation)
    require(request.epoch > 0, "SessionClaimable", where, request.phase)
    require(request.phase is Phase.DONE, "NoTurnStuck", where, request.phase)
    known = world.checkers.references[world.around.partition_of[conversation.session]].known
    held = known[conversation.session].tokens
    require(held == request.tokens, "Converged", where, held, request.tokens)


def _last_request(world: World, node: Shell, conversation: Conversation) -> Request:
    tokens = [*conversation.seen[: world.rng.randint(0, LAST_PROMPT_MAX)], 0]
    request = world.request(node, conversation, tokens)
    request.target, request.ids_only = len(tokens) + 2, False
    world.around.now_ns += 1
    node.engine.begin(request)
    _come_to_rest(world)
    return request


def _has_lost_records(world: World, node: Shell, conversation: Conversation) -> bool:
    """Whether the node owns the session, and what it wrote last was lost in silence or with a tail."""
    assert node.core is not None, "no node dies while the run is drained"
    primary = node.core.primary(conversation.session)
    if primary is None or primary.is_drained(node.core.state(conversation.session)):
        return False
    return _may_be_lost(world, primary)


def _is_well(world: World, node: Shell) -> None:
    core = node.core
    assert core is not None, "no node dies while the run is drained"
    world.checkers.all_rows(node)
    leftovers = {
        "claims": list(core._claims),
        "turns": core._owned._turns,
        "rewrites": list(filter(None, [node.rewriter.work, node.rewriter.ask])),
    }
    require(not any(leftovers.values()), "NoTurnStuck", node.name, leftovers)
    require(core.is_drained(), "NoTurnStuck", node.name, "sent what was never folded")
    require(not node.buffer.pins, "BoundedMemory", node.name, "pins are left")
    owned = {primary.session for primary in core.primaries()}
    for number, partition in core.partitions.items():
        require(partition._held <= owned, "BoundedMemory", node.name, "holds what it does not own")
        states = list(partition.sessions())
        others = [state for state in states if state.session not in owned]
        require(
            len(states) <= TINY.sessions_a_partition or not others, "BoundedMemory", node.name, len(states)
        )
        require(len(partition._since) <= TINY.sessions_a_partition, "BoundedMemory", node.name, "since")
        require(not partition._doubts, "BoundedMemory", node.name, "doubts", partition._doubts)
        _knows_all(world, node, number)


def _knows_all(world: World, node: Shell, number: Partition) -> None:
    """A reader has every session that it has room for and whose claim it has read; its own sessions are whole."""
    assert node.core is not None, "no node dies while the run is drained"
    partition = node.core.partitions[number]
    known = world.checkers.references[number].known
    room = len(list(partition.sessions())) < TINY.sessions_a_partition
    for session, reference in known.items():
        state = partition.session(session)
        if state is None:
            since = max(partition.read_from, partition._since.get(session, 0))
            require(
                not room or since >= reference.claim.epoch, "Converged", node.name, "does not know", session
            )
            continue
        same = state.claim.nonce == reference.claim.nonce
        require(same, "Converged", node.name, session, state.claim, reference.claim)
        mine = node.core.primary(session) is not None
        require(not mine or state.standing is Standing.WHOLE, "Converged", node.name, state.standing)
