"""The checkers: what must hold after every step, each under the name by which a mutant is said to be caught.

MonotonicEpoch           a reader never goes back to an older epoch of a session while it reads on
OneWriterPerEpoch        one writer, whose claim was admitted, writes under an epoch
NoStaleApplied           what is applied or claimed, the reference admitted too
NoTwoOwners              no two readers name different owners at one offset, wherever they began to read
StandbysAgreeAtOffset    readers that know a session have the same chain, lengths, tokens and standing at one offset
StandbyIsPrefixOfAcked   a reader holds what the primary's projection was after the same number of records
AttachOnlyAfterOwnClaim  a turn is opened only after the own claim was read back and was the winner
AttachedRight            attached bytes are of the request's tokens, context and identity
OneLineage               every stored row descends from the very tokens below it
PinnedBytesImmutable     what an attach was given does not change under it
AcknowledgedNotLost      what a primary acknowledged, the log gives to a reader that comes later
ChainsEqualCachesEqual   the same chain means the same rows, whoever holds them
HonestNeverBreaks        a session breaks only where a record was damaged, lost in silence or swapped
SilentAfterUnknown       nothing is written under an epoch after an append of it has failed
NoClaimBack              a request that was fenced opens no turn under a newer epoch
OneAnswer                a request for a turn gets exactly one answer
RequestsFirst            no request is refused because of a rewrite
RewrittenIsKnown         a session that was rewritten is known to a reader that begins where the rewrite began

Four more look at the end of a run: tests.sim.ending.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.core.effects import (
    AppendRecord,
    CutRows,
    DropSession,
    SessionBroken,
    SessionClaimed,
    StoreRows,
    TurnAcknowledged,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import AppendFailed, HoleRead, LogReplacedRead, RecordRead, UnreadableRead
from kvlog.core.session import Standing
from kvlog.records import Claim, Delta, Snapshot
from tests.sim.buffer import BLOCK
from tests.sim.reference import Known, Reference
from tests.sim.rows import context_number, identity_number, is_row, lineages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlog.core.effects import Effect
    from kvlog.core.inputs import Input
    from kvlog.core.session import SessionState
    from kvlog.ids import Epoch, Nonce, Offset, Partition, SessionId, Writer
    from tests.sim.engine import Request
    from tests.sim.modellog import Message, ModelLog
    from tests.sim.shell import Shell

NAMES = frozenset(
    {
        *("MonotonicEpoch", "OneWriterPerEpoch", "NoStaleApplied", "NoTwoOwners", "StandbysAgreeAtOffset"),
        *("StandbyIsPrefixOfAcked", "AttachOnlyAfterOwnClaim", "AttachedRight", "OneLineage"),
        *("PinnedBytesImmutable", "AcknowledgedNotLost", "ChainsEqualCachesEqual", "HonestNeverBreaks"),
        *("SilentAfterUnknown", "NoClaimBack", "OneAnswer", "RequestsFirst", "RewrittenIsKnown"),
        *("Converged", "SessionClaimable", "NoTurnStuck", "BoundedMemory"),
    }
)

Owner = tuple[int, bytes, bytes]
Content = tuple[int, "int | None", tuple[bytes, ...]]


class Violation(AssertionError):
    """An invariant does not hold.

    Args:
        checker: its name.
        text: what was seen.
    """

    def __init__(self, checker: str, text: str) -> None:
        assert checker in NAMES, "a checker has a name"
        super().__init__(f"{checker}: {text}")
        self.checker = checker


_alone: list[str] = []


@contextmanager
def alone(checker: str) -> Iterator[None]:
    """Let one checker speak only: what would it have said, had another not been first?"""
    _alone.append(checker)
    try:
        yield
    finally:
        _alone.clear()


def require(holds: object, checker: str, text: str, *details: object) -> None:
    """Raise a Violation unless it holds."""
    if not holds and (not _alone or checker in _alone):
        raise Violation(checker, " ".join([text, *map(str, details)]))


@dataclass(slots=True)
class Seen:
    """What the reference says of one session after one message."""

    owner: Owner
    standing: Standing
    content: Content


def _owner(claim: Claim) -> Owner:
    return claim.epoch, claim.writer, claim.nonce


def _content(state: SessionState) -> Content:
    return state.next_seq, state.chain, tuple(shard.tokens.tobytes() for shard in state.shards)


def _known_content(known: Known) -> Content:
    tokens = tuple(b"".join(t.to_bytes(4, "little") for t in shard) for shard in known.shards)
    return known.next_seq, known.chain, tokens


@dataclass(slots=True)
class Admitted:
    """A claim that the reference admitted."""

    claim: Claim
    offset: Offset


@dataclass(slots=True)
class Checkers:
    """All of them; what they must remember."""

    log: ModelLog
    references: list[Reference] = field(default_factory=list)
    seen: dict[int, dict[SessionId, Seen]] = field(default_factory=dict)
    verdicts: dict[int, str] = field(default_factory=dict)
    claims: dict[SessionId, list[Admitted]] = field(default_factory=dict)
    damaged: set[tuple[SessionId, Epoch]] = field(default_factory=set)
    """Sessions and epochs of which a record was damaged, lost in silence or swapped."""
    tainted: set[tuple[str, Writer, SessionId]] = field(default_factory=set)
    lost_sight: set[tuple[Writer, SessionId]] = field(default_factory=set)
    epochs: dict[tuple[Writer, SessionId], Epoch] = field(default_factory=dict)
    writing: dict[tuple[SessionId, Epoch], Nonce] = field(default_factory=dict)
    silenced: set[Nonce] = field(default_factory=set)
    projections: dict[tuple[Nonce, int], tuple[bytes, ...]] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    stored: bool = False
    _newest: dict[Partition, dict[SessionId, Seen]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """One reference a partition."""
        self.references = [Reference(p) for p in range(len(self.log.partitions))]  # type: ignore[arg-type]

    # What happens to the log

    def landed(self, partition: Partition, offset: Offset, message: Message | None) -> None:
        """A message (or an offset without one) was appended: the reference reads it at once."""
        reference = self.references[partition]
        verdict = reference.read(offset, message)
        if message is None:
            return
        record = message.entry.record
        self.verdicts[message.uid] = verdict
        if verdict == "broke":
            blamed = (record.session, record.epoch) in self.damaged or self.log.partitions[
                partition
            ].generation
            require(blamed, "HonestNeverBreaks", "the log itself breaks the session at", offset, record)
        if verdict == "admitted" and isinstance(record, Claim):
            self.claims.setdefault(record.session, []).append(Admitted(record, offset))
        self._note_seen(reference, message)

    def _note_seen(self, reference: Reference, message: Message) -> None:
        """What stands now, of every session of the partition; only the message's own can have changed."""
        before = self._newest.get(reference.partition, {})
        seen = {session: before[session] for session in reference.known if session in before}
        known = reference.known.get(message.session)
        if known is not None:
            seen[message.session] = Seen(_owner(known.claim), known.standing, _known_content(known))
        self.seen[message.uid] = self._newest[reference.partition] = seen

    def tail_lost(self, partition: Partition) -> None:
        """The reference begins anew on what is left."""
        reference = self.references[partition] = Reference.of(partition, self.log.partitions[partition])
        self._newest[partition] = {
            session: Seen(_owner(known.claim), known.standing, _known_content(known))
            for session, known in reference.known.items()
        }
        for admitted in self.claims.values():
            admitted[:] = [a for a in admitted if a.claim.nonce in self.log.claims]

    def damaged_here(self, shell: Shell, partition: Partition, message: Message) -> None:
        """One reader reads a message as damaged that others may read well."""
        for session, of in shell.around.partition_of.items():
            if of == partition:
                self.tainted.add((shell.name, shell.writer, session))
        assert message.uid in self.verdicts, "what is read has landed"

    # What a node does

    def before(self, shell: Shell, happened: Input) -> None:
        """An input is about to be fed."""
        self.stored = False
        core = shell.core
        assert core is not None, "only a living node is fed"
        match happened:
            case AppendFailed(record) if not isinstance(record, Claim):
                primary = core.primary(record.session)
                if primary is not None and primary.claim.epoch == record.epoch:
                    self.silenced.add(primary.claim.nonce)
            case LogReplacedRead(partition, offset) | HoleRead(partition, offset):
                if isinstance(happened, LogReplacedRead) or offset < core.partitions[partition].applied:
                    for session, of in shell.around.partition_of.items():
                        if of == partition:
                            self.epochs.pop((shell.writer, session), None)
            case _:
                pass

    def effect(self, shell: Shell, effect: Effect, cause: Message | None) -> None:
        """An effect is about to be carried out."""
        match effect:
            case StoreRows() | CutRows():
                self.stored = self.stored or isinstance(effect, StoreRows)
                self._applied(effect, cause)
            case SessionClaimed(claim):
                self._applied(effect, cause)
                key = (shell.writer, claim.session)
                require(claim.epoch > self.epochs.get(key, 0), "MonotonicEpoch", shell.name, claim)
                self.epochs[key] = claim.epoch
            case SessionBroken():
                self._broken(shell, effect, cause)
            case AppendRecord():
                self._appended(shell, effect)
            case TurnOpened():
                self._opened(shell, effect)
            case TurnUnlogged():
                self._is_asked(shell, effect)
                self._is_not_for_a_rewrite(shell, effect)
            case TurnAcknowledged():
                self._acknowledged(shell, effect)
            case _:
                self._dropped(shell, effect)

    def after(self, shell: Shell, happened: Input, cause: Message | None) -> None:
        """An input was fed and its effects were carried out."""
        self.pinned(shell)
        if cause is None or shell.core is None:
            return
        assert isinstance(happened, RecordRead | UnreadableRead), "only these are read from a message"
        core = shell.core.partitions[happened.partition]
        if not core.position == core.applied == happened.offset + 1:
            return  # it is being read again
        for state in core.sessions():
            if state.session == cause.session:
                self._agree(shell, state, cause)
            else:
                self._same_owner(shell, state, cause)
        known = core.session(cause.session)
        if known is not None and self.stored:
            self._rows_are_right(shell, known, cause)

    def attached(self, shell: Shell, request: Request, *, shard: int, position: int) -> None:
        """The engine copies one row of its pinned blocks."""
        pin = request.pin
        assert pin is not None, "an attach has pinned blocks"
        require(position < request.attach_to, "AttachedRight", "beyond what was offered", position)
        found = pin.blocks[shard][position // BLOCK].rows[position % BLOCK]
        right = found is not None and is_row(
            found, request.lineage_at(position), position, shard=shard, made_under=request.made_under
        )
        require(right, "AttachedRight", shell.name, request.session, "shard", shard, "position", position)

    def pinned(self, shell: Shell) -> None:
        """Compare every pinned block with what it held when it was given."""
        for pin in shell.buffer.pins:
            for blocks, held in zip(pin.blocks, pin.held, strict=True):
                for block, rows in zip(blocks, held, strict=True):
                    require(tuple(block.rows) == rows, "PinnedBytesImmutable", shell.name, pin.session)

    def all_rows(self, shell: Shell) -> None:
        """At the end: every present row of every session."""
        assert shell.core is not None, "all nodes live at the end"
        for core in shell.core.partitions.values():
            for state in core.sessions():
                for shard, held in enumerate(state.shards):
                    self._lineage_is_right(shell, state, shard, range(held.length))

    # One checker each

    def _applied(self, effect: Effect, cause: Message | None) -> None:
        verdict = self.verdicts[cause.uid] if cause is not None else "nothing"
        require(verdict == "admitted", "NoStaleApplied", "the reference says", verdict, "of", effect)

    def _broken(self, shell: Shell, effect: SessionBroken, cause: Message | None) -> None:
        assert cause is not None, "only a message breaks a session"
        seen = self.seen[cause.uid].get(effect.session)
        blamed = (seen is not None and seen.standing is Standing.BROKEN) or self._is_tainted(
            shell, effect.session
        )
        require(blamed, "HonestNeverBreaks", shell.name, "breaks alone:", effect)

    def _is_tainted(self, shell: Shell, session: SessionId) -> bool:
        return (shell.name, shell.writer, session) in self.tainted

    def _dropped(self, shell: Shell, effect: Effect) -> None:
        if isinstance(effect, DropSession):
            self.lost_sight.add((shell.writer, effect.session))

    def _appended(self, shell: Shell, effect: AppendRecord) -> None:
        record = effect.record
        if isinstance(record, Claim | Snapshot):
            return
        assert shell.core is not None, "only a living node appends"
        primary = shell.core.primary(record.session)
        assert primary is not None, "only a primary writes"
        claim = primary.claim
        require(claim.nonce not in self.silenced, "SilentAfterUnknown", shell.name, record)
        self._is_owner(shell, claim)
        folded = shell.core.partitions[shell.around.partition_of[record.session]].session(record.session)
        fenced = folded is not None and folded.claim.nonce != claim.nonce
        require(
            not fenced, "OneWriterPerEpoch", shell.name, "writes on after it has read a newer claim", record
        )
        first = self.writing.setdefault((record.session, record.epoch), claim.nonce)
        if not self._has_won(record.session, first):  # the log lost that claim: the number may come again
            self.writing[record.session, record.epoch] = first = claim.nonce
        both = self._has_won(record.session, claim.nonce) and first != claim.nonce
        require(not both, "OneWriterPerEpoch", "two claims write under", record.epoch, record.session)
        projected = primary._projected
        if projected.next_seq == record.seq + 1:
            tokens = tuple(shard.tokens.tobytes() for shard in projected.shards)
            self.projections[claim.nonce, record.seq] = tokens

    def _is_owner(self, shell: Shell, claim: Claim) -> None:
        partition = shell.around.partition_of[claim.session]
        if shell.generation[partition] != self.log.partitions[partition].generation:
            return  # it has not noticed yet that the log lost its tail
        there = claim.nonce in self.log.claims
        require(there, "AttachOnlyAfterOwnClaim", shell.name, "claim is not in the log:", claim)
        won = self._has_won(claim.session, claim.nonce)
        require(won, "OneWriterPerEpoch", shell.name, "its claim did not win:", claim)

    def _has_won(self, session: SessionId, nonce: Nonce) -> bool:
        return any(admitted.claim.nonce == nonce for admitted in self.claims.get(session, ()))

    def _opened(self, shell: Shell, effect: TurnOpened) -> None:
        self._is_asked(shell, effect)
        assert shell.core is not None, "only a living node opens turns"
        primary = shell.core.primary(effect.session)
        require(
            primary is not None
            and (primary.claim.writer, primary.claim.epoch) == (shell.writer, effect.epoch),
            "AttachOnlyAfterOwnClaim",
            shell.name,
            effect,
        )
        assert primary is not None, "required above"
        claim, partition = primary.claim, shell.around.partition_of[effect.session]
        self._is_owner(shell, claim)
        place = self.log.claims.get(claim.nonce)
        if place is not None and shell.generation[partition] == self.log.partitions[partition].generation:
            read = shell.core.partitions[partition].applied > place[1]
            require(read, "AttachOnlyAfterOwnClaim", shell.name, "has not read its claim", effect)
        request = shell.engine.asks.get(effect.request)
        continues = request.epoch if request is not None else shell.rewriter.continues
        if continues and not self.log.partitions[partition].generation:
            self._no_claim_back(shell, continues, effect)

    @staticmethod
    def _is_asked(shell: Shell, effect: TurnOpened | TurnUnlogged) -> None:
        asked = effect.request in shell.engine.asks or effect.request == shell.rewriter.ask
        require(asked, "OneAnswer", "answered twice", effect)

    @staticmethod
    def _is_not_for_a_rewrite(shell: Shell, effect: TurnUnlogged) -> None:
        if effect.reason is not UnloggedReason.BUSY or effect.request == shell.rewriter.ask:
            return
        assert shell.core is not None, "only a living node answers"
        primary, claim = shell.core.primary(effect.session), shell.core._claims.get(effect.session)
        rewrites = (primary is not None and primary.is_rewriting) or (
            claim is not None and claim.asked is not None and claim.asked.rewrites
        )
        require(not rewrites, "RequestsFirst", shell.name, effect)

    def _no_claim_back(self, shell: Shell, continues: Epoch, effect: TurnOpened) -> None:
        assert shell.core is not None, "only a living node opens turns"
        core = shell.core.partitions[shell.around.partition_of[effect.session]]
        if (shell.writer, effect.session) in self.lost_sight or core.read_from >= continues:
            return  # it cannot know
        rivals = [
            a.claim.epoch
            for a in self.claims.get(effect.session, ())
            if continues < a.claim.epoch < effect.epoch and a.claim.writer != shell.writer
        ]
        require(not rivals, "NoClaimBack", shell.name, "was fenced by", rivals, "yet opens", effect)

    def _acknowledged(self, shell: Shell, effect: TurnAcknowledged) -> None:
        request, work = shell.engine.turns.get(effect.turn), shell.rewriter.work
        of_rewrite = work.tokens if work is not None and work.turn == effect.turn else None
        tokens = request.tokens if request is not None else of_rewrite
        partition = shell.around.partition_of[effect.session]
        log = self.log.partitions[partition]
        assert shell.core is not None, "only a living node acknowledges"
        primary = shell.core.primary(effect.session)
        known = self.references[partition].known.get(effect.session)
        if tokens is None or primary is None or shell.generation[partition] != log.generation:
            return
        if known is None or known.claim.nonce != primary.claim.nonce:
            return  # fenced already, or unreadable further on
        kept = known.length >= effect.length and known.tokens[: effect.length] == tokens[: effect.length]
        require(kept, "AcknowledgedNotLost", shell.name, effect, "the log gives", known.length)
        if of_rewrite is not None and not log.generation:
            late = Reference.of(partition, log, first=shell.rewriter.began_at).known.get(effect.session)
            whole = late is not None and late.tokens[: effect.length] == tokens[: effect.length]
            require(whole, "RewrittenIsKnown", shell.name, effect, "who begins there has", late)

    def _same_owner(self, shell: Shell, state: SessionState, cause: Message) -> Seen | None:
        """The owner, and what is quick to compare; a session changes only by its own messages."""
        seen = self.seen[cause.uid].get(state.session)
        if seen is None or seen.owner != _owner(state.claim):
            require(
                holds=False,
                checker="NoTwoOwners",
                text=f"{shell.name} {cause.uid}: {state.claim}, not {seen}",
            )
        elif state.standing is Standing.WHOLE and (state.next_seq, state.chain) != seen.content[:2]:
            require(
                holds=False, checker="StandbysAgreeAtOffset", text=f"{shell.name} {state.session} {cause.uid}"
            )
        return seen

    def _agree(self, shell: Shell, state: SessionState, cause: Message) -> None:
        where = f"{shell.name} {state.session} after message {cause.uid}"
        seen = self._same_owner(shell, state, cause)
        if seen is None:
            return
        if state.standing in (Standing.WHOLE, Standing.ENDED):
            same = seen.standing is state.standing
            require(same, "StandbysAgreeAtOffset", where, state.standing, "not", seen.standing)
            mine = _content(state)
            require(mine == seen.content, "StandbysAgreeAtOffset", where, mine, seen.content)
            self._is_prefix(state, where)
        elif state.standing is Standing.BROKEN and not self._is_tainted(shell, state.session):
            same = seen.standing is Standing.BROKEN or state.chain is None
            require(same, "StandbysAgreeAtOffset", where, state.standing, "not", seen.standing)

    def _is_prefix(self, state: SessionState, where: str) -> None:
        projection = self.projections.get((state.claim.nonce, state.next_seq - 1))
        if projection is not None:
            mine = tuple(shard.tokens.tobytes() for shard in state.shards)
            require(mine == projection, "StandbyIsPrefixOfAcked", where, mine, projection)

    def _rows_are_right(self, shell: Shell, state: SessionState, cause: Message) -> None:
        record = cause.entry.record
        assert isinstance(record, Delta) and state.chain is not None, "rows come in deltas"  # noqa: PT018
        positions = range(record.start, record.start + len(record.tokens))
        self._lineage_is_right(shell, state, record.shard, positions)
        for position in positions:
            found = shell.buffer.row(state.session, record.shard, position)
            if found is not None:
                first = self.rows.setdefault((state.chain, record.shard, position), found)
                require(first == found, "ChainsEqualCachesEqual", shell.name, state.session, position)

    def _lineage_is_right(self, shell: Shell, state: SessionState, shard: int, positions: range) -> None:
        held = state.shards[shard]
        histories: dict[int, list[int]] = {}
        for position in positions:
            run = next(run for run in reversed(held.runs) if run.start <= position)
            identity, context = identity_number(run.identity), context_number(run.context)
            made_under = identity * 16 + context
            if made_under not in histories:
                histories[made_under] = lineages(state.session, held.tokens, identity, context)
            found = shell.buffer.row(state.session, shard, position)
            right = found is None or is_row(
                found, histories[made_under][position], position, shard=shard, made_under=made_under
            )
            require(right, "OneLineage", shell.name, state.session, "shard", shard, "position", position)
