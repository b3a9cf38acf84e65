"""Statuses of the wire and the exceptions that carry them."""

import enum
from collections import namedtuple

SCOPES = ("none", "item", "request", "session", "connection", "daemon")

StatusRow = namedtuple("StatusRow", "number name scope retryable text")

# The table of PROTOCOL.md, section 6; a test compares them.
STATUSES = tuple(StatusRow(*row) for row in (
    (0, "OK", "none", False, "ok"),
    (100, "BAD_MAGIC", "connection", False, "not a tqkv frame"),
    (101, "VERSION_UNSUPPORTED", "connection", False, "protocol version not supported"),
    (102, "BAD_CRC", "connection", False, "checksum does not match"),
    (103, "TOO_LARGE", "connection", False, "larger than the limit"),
    (104, "BAD_FRAME", "connection", False, "malformed frame"),
    (105, "UNSUPPORTED", "request", False, "not supported"),
    (106, "BAD_ARG", "request", False, "bad argument"),
    (107, "BAD_VALUE", "item", False, "a row holds a value that cannot be stored"),
    (108, "FORMAT_MISMATCH", "request", False, "pool fingerprint differs"),
    (109, "SLOT_OUT_OF_RANGE", "request", False, "slot outside the pool"),
    (200, "UNAUTHENTICATED", "connection", False, "not authenticated"),
    (201, "FORBIDDEN", "request", False, "not allowed"),
    (300, "NOT_FOUND", "item", False, "not found"),
    (301, "STALE_HANDLE", "session", False, "handle of a closed session"),
    (302, "STALE_EPOCH", "session", False, "handle of an earlier start of the daemon"),
    (303, "SESSION_EXPIRED", "session", False, "the session's lease ran out"),
    (304, "EVICTED", "item", False, "the sequence was evicted"),
    (305, "NOT_OWNER", "request", False, "another connection owns the session"),
    (306, "EXISTS", "item", False, "already exists"),
    (307, "BAD_STATE", "request", False, "not possible in this state"),
    (308, "POSITION", "item", False, "position is not the sequence's length"),
    (309, "LEN_LIMIT", "item", False, "sequence would exceed tokens_max"),
    (310, "WINDOW_GONE", "item", False, "the window reaches freed blocks"),
    (400, "POOL_FULL", "item", True, "no free block"),
    (401, "QUOTA", "item", True, "quota exceeded"),
    (402, "BUSY_RETRY", "request", True, "busy"),
    (403, "LIMIT", "request", False, "limit reached"),
    (404, "DRAINING", "request", False, "the daemon is draining"),
    (405, "SLOW_CONSUMER", "connection", False, "the peer is too slow"),
    (500, "INTERNAL", "request", False, "internal error"),
    (501, "DEVICE_LOST", "daemon", False, "device lost"),
    (502, "DEADLINE", "request", True, "deadline passed"),
    (503, "CANCELLED", "request", False, "cancelled"),
    (504, "CORRUPT", "request", False, "data is corrupt"),
))
# Found by this package; never on the wire.
IO_ERROR_ROW = StatusRow(901, "IO_ERROR", "connection", False, "connection lost")

BY_NUMBER = {row.number: row for row in STATUSES + (IO_ERROR_ROW,)}
Status = enum.IntEnum("Status", {row.name: row.number for row in BY_NUMBER.values()})
Status.__doc__ = "Every status by its name: tqkv.Status.POOL_FULL == 400. A newer server may send other numbers."

NO_ITEM, NO_LAYER, NO_ROW = 0xFFFFFFFF, 0xFFFF, 0xFFFFFFFF


def status_name(number):
    row = BY_NUMBER.get(number)
    return row.name if row else f"status {number}"


def status_text(number):
    row = BY_NUMBER.get(number)
    return row.text if row else "unknown here: the server is newer"


def ends_by_itself(number, retryable=None):
    """Whether a refusal is likely to be over soon, so that a call is repeated until its deadline. A quota is there
    until somebody of the tenant gives something back, and that may be the caller, who waits."""
    return number != Status.QUOTA and (status_is_retryable(number) if retryable is None else retryable)


def status_is_retryable(number):
    row = BY_NUMBER.get(number)
    return bool(row and row.retryable)


class ItemResult(namedtuple("ItemResult", "index sequence status length n_tokens layer row retry_after_ms")):
    """What became of one item of a call.

    index: its place in the call. status: 0 is OK. length: the sequence's length now, the least over the layers of
    the call; at POSITION what was expected. n_tokens: how many tokens of this call are stored. layer, row: the
    first bad one (BAD_VALUE), row counted from the item's first token; None when there is none.
    """

    __slots__ = ()

    @property
    def ok(self):
        return self.status == 0

    @property
    def status_name(self):
        return status_name(self.status)

    @property
    def retryable(self):
        return status_is_retryable(self.status)

    def __str__(self):
        return f"{self.status_name}: {self.describe()}"

    def describe(self, operation=""):
        """As str(), without the status' name. operation: the name of what was called, which may know more."""
        text = f"sequence {self.sequence}: "
        if self.status == Status.POSITION and operation == "FORK":
            text += f"its length is above that of its parent, which has {self.length} tokens on all layers"
        elif self.status == Status.POSITION and operation == "DECODE":
            text += f"it would see more tokens than there are, the sequence has {self.length}"
        elif self.status == Status.POSITION:
            text += f"{status_text(self.status)}, the sequence has {self.length} tokens"
        else:
            text += status_text(self.status)
        if self.status == Status.QUOTA:
            text += ", one of the tenant's: 'tqkvctl tenants' tells which"
        if self.layer is not None:
            text += f", layer {self.layer}"
        if self.row is not None:
            text += f", row {self.row}"
        if self.n_tokens:
            text += f"; {self.n_tokens} tokens of this call are stored"
        return text


class TqkvError(Exception):
    """A call failed.

    status, status_name: the number and its name ("POOL_FULL"). retryable: the same call may succeed later, not
    before retry_after_ms. scope: what is over: "item", "request", "session", "connection" or "daemon". detail: the
    text without the name. is_local: found by this package; otherwise the server said it. outcome_unknown: the request
    was on its way and may or may not have taken effect (Session.lengths() tells). item, offset, expected, got: where
    the server says so, else None or 0. item_errors: an ItemResult for every failed item of a row operation; results:
    one for every item; out, lse: outputs of the items that did not fail (failed ones are zeros and -inf).
    """

    def __init__(self, status, detail="", *, scope=None, retryable=None, retry_after_ms=0, is_local=True,
                 outcome_unknown=False, item=None, offset=0, expected=0, got=0, results=()):
        row = BY_NUMBER.get(status)
        self.status = int(status)
        self.status_name = status_name(status)
        self.scope = scope or (row.scope if row else "request")
        self.retryable = status_is_retryable(status) if retryable is None else retryable
        self.retry_after_ms = retry_after_ms
        self.detail = detail or status_text(status)
        self.is_local = is_local
        self.outcome_unknown = outcome_unknown
        self.item, self.offset, self.expected, self.got = item, offset, expected, got
        self.results = list(results)
        self.item_errors = [result for result in self.results if not result.ok]
        self.out = self.lse = None
        super().__init__(f"{self.status_name}: {self.detail}")

    def copy(self, **changes):
        """The same error for another request."""
        names = ("scope", "retryable", "retry_after_ms", "is_local", "outcome_unknown", "item", "offset", "expected",
                 "got", "results")
        values = {name: getattr(self, name) for name in names}
        values.update(changes)
        return TqkvError(values.pop("status", self.status), values.pop("detail", self.detail), **values)


class ArgumentError(TqkvError, ValueError):
    """A wrong shape, size or number, found before anything was sent."""

    def __init__(self, detail):
        TqkvError.__init__(self, Status.BAD_ARG, detail)


class ArgumentTypeError(TqkvError, TypeError):
    """A wrong type, found before anything was sent."""

    def __init__(self, detail):
        TqkvError.__init__(self, Status.BAD_ARG, detail)
