"""Names of states, events, bookkeeping and effects. Generated from specs/ by `make gen`. Edit the spec, not this file."""

from enum import StrEnum


class SenderState(StrEnum):
    """States of the sender."""

    #: accepts chunks
    ACTIVE = "active"
    #: the end is queued or in flight: nothing more is accepted
    TERMINAL_PENDING = "terminal_pending"
    #: cancelled, but still the owner of the external id: the end still flushes, producer state stays readable for that flush
    CANCELLED_CURRENT = "cancelled_current"
    #: something failed: state is retained, an end(error) goes out
    FAILED = "failed"
    #: released: nothing brings this generation's state back
    FINALIZED = "finalized"


class SenderEvent(StrEnum):
    """Events of the sender: what happened."""

    #: the runner offers a chunk
    CHUNK_SUBMITTED = "chunk_submitted"
    #: the runner offers the last chunk of a segment, perhaps without output
    SEGMENT_END_SUBMITTED = "segment_end_submitted"
    #: the runner says that the stream is complete
    END_SUBMITTED = "end_submitted"
    #: a worker takes the head of the queue; its producer runs once, outside every lock
    TASK_BEGUN = "task_begun"
    #: the producer returned what goes into the frame; a task that comes back keeps it
    FRAME_BUILT = "frame_built"
    #: the producer of a chunk returned nothing: no frame, no seq
    CHUNK_BUFFERED = "chunk_buffered"
    #: the connector stored the frame that announces the request
    OPEN_PUT = "open_put"
    #: the connector stored a chunk
    DATA_PUT = "data_put"
    #: the connector stored the last chunk of a segment
    SEGMENT_END_PUT = "segment_end_put"
    #: the connector stored the end
    END_PUT = "end_put"
    #: the connector stored the end, and a release was noted before
    END_PUT_AFTER_RELEASE = "end_put_after_release"
    #: a put failed for now (or raised), attempts are left
    PUT_RETRIED = "put_retried"
    #: the connector was busy: no credit or no room
    PUT_DEFERRED = "put_deferred"
    #: a put of data failed for now or was busy while a failed end waits behind it
    PUT_ABANDONED = "put_abandoned"
    #: the producer of a chunk raised
    PRODUCER_RAISED = "producer_raised"
    #: the producer of the end raised while it flushed
    END_PRODUCER_RAISED = "end_producer_raised"
    #: no attempt is left for a chunk, or the connector refused it, or it was busy for too long
    DATA_GIVEN_UP = "data_given_up"
    #: no attempt is left for an end(ok)
    OK_END_GIVEN_UP = "ok_end_given_up"
    #: no attempt is left for a failed end
    END_GIVEN_UP = "end_given_up"
    #: no attempt is left for a failed end, and a release was noted before
    END_GIVEN_UP_AFTER_RELEASE = "end_given_up_after_release"
    #: this stage's own receiver failed
    UPSTREAM_FAILED = "upstream_failed"
    #: the runner says that the request failed
    HOST_FAILED = "host_failed"
    #: the runner cancels, or this stage's own receiver was cancelled
    CANCELLED = "cancelled"
    #: the runner lets go, or a successor waits for the external id
    RELEASED = "released"
    #: the stage shuts down
    CLOSED = "closed"
    #: the runner, a successor or the shutdown lets go once the marker is resolved
    RELEASED_AFTER_END = "released_after_end"
    #: the receiver cancelled, failed, had enough or dropped the stream unclaimed
    RECEIVER_STOPPED = "receiver_stopped"
    #: the receiver's process is gone
    PEER_LOST = "peer_lost"


class SenderBookkeeping(StrEnum):
    """What the sender does to itself."""

    #: append the chunk
    QUEUE_CHUNK = "queue_chunk"
    #: append the chunk that ends its segment
    QUEUE_SEGMENT_END = "queue_segment_end"
    #: append the end(ok)
    QUEUE_END = "queue_end"
    #: append an end(cancelled)
    QUEUE_END_CANCELLED = "queue_end_cancelled"
    #: make the queued end an end(error), or append one; an end in flight decides by itself
    QUEUE_END_ERROR = "queue_end_error"
    #: the end in flight loses its payload and goes out as error
    EMPTY_END_AS_ERROR = "empty_end_as_error"
    #: the end in flight loses its payload and goes out as cancelled
    EMPTY_END_AS_CANCELLED = "empty_end_as_cancelled"
    #: a queued end(ok) becomes end(cancelled) if any accepted chunk was dropped
    CANCEL_END_IF_DROPPED = "cancel_end_if_dropped"
    #: drop the queued chunks
    DROP_CHUNKS = "drop_chunks"
    #: drop the chunk in flight
    DROP_IN_FLIGHT = "drop_in_flight"
    #: drop what is queued and in flight
    DROP_ALL = "drop_all"
    #: move the head of the queue into flight
    TAKE_HEAD = "take_head"
    #: keep the built frame with the task in flight
    KEEP_FRAME = "keep_frame"
    #: nothing is in flight any more
    CLEAR_IN_FLIGHT = "clear_in_flight"
    #: the task in flight goes back to the head: order is kept
    REQUEUE_AT_HEAD = "requeue_at_head"
    #: one attempt of the task in flight is used up
    COUNT_ATTEMPT = "count_attempt"
    #: the seq of the frame in flight is used, stored or burned
    ADVANCE_SEQ = "advance_seq"
    #: frames built from here on belong to the next segment
    NEXT_SEGMENT = "next_segment"
    #: remember that the runner has let go
    NOTE_RELEASE = "note_release"
    #: remember that the marker is resolved
    SETTLE_MARKER = "settle_marker"


class SenderEffect(StrEnum):
    """What the runtime does for the sender."""

    #: release the segment-scoped namespaces before the next task begins
    RESET_SEGMENT = "reset_segment"
    #: report the failure once, under the internal id
    RECORD_FAILURE = "record_failure"
    #: pass the cause to this stage's own receiver of the request
    TELL_RECEIVER = "tell_receiver"
    #: report that no end could be delivered: the receiver ends by deadline or peer loss
    REPORT_MARKER_LOST = "report_marker_lost"
    #: release every namespace and forget this life
    RELEASE = "release"
    #: tell the connector to drop what is stored and unread: nobody is left to read it
    RECLAIM_UNREAD = "reclaim_unread"


class ReceiverState(StrEnum):
    """States of the receiver."""

    #: waits (nothing staged) or is ready (something is)
    ACTIVE = "active"
    #: end(ok) arrived; the scheduler has not consumed it yet
    TERMINAL_PENDING = "terminal_pending"
    #: left while a get is in flight: what arrives is discarded, never published
    CANCELLED_CURRENT = "cancelled_current"
    #: failed with its first cause: error or cancelled end, invalid frame, deadline, peer loss, get given up, unclaimed
    FAILED = "failed"
    #: nothing left of this registration
    FINALIZED = "finalized"


class ReceiverEvent(StrEnum):
    """Events of the receiver: what happened."""

    #: the sender announced the request: it exists
    OPEN_ARRIVED = "open_arrived"
    #: the sender announced the request again: its put had reported failure
    OPEN_REPEATED = "open_repeated"
    #: the inbox fetches a frame's body, outside every lock
    GET_BEGUN = "get_begun"
    #: fetching failed for now, attempts are left
    GET_RETRIED = "get_retried"
    #: no attempt is left to fetch a body
    GET_GIVEN_UP = "get_given_up"
    #: a chunk with the next seq came
    DATA_ARRIVED = "data_arrived"
    #: end(ok) with the next seq came
    OK_END_ARRIVED = "ok_end_arrived"
    #: an error or cancelled end came, whatever its seq
    FAILED_END_ARRIVED = "failed_end_arrived"
    #: a chunk or end(ok) came whose seq was seen before
    FRAME_REPEATED = "frame_repeated"
    #: a chunk or end(ok) came whose seq is not the next: one is missing
    FRAME_AHEAD = "frame_ahead"
    #: a frame came whose body or header cannot be accepted
    FRAME_INVALID = "frame_invalid"
    #: the receiver waited for the whole stall time without a frame
    DEADLINE_PASSED = "deadline_passed"
    #: at the front: the request's sender lost its receiver or was stopped
    REQUEST_FAILED = "request_failed"
    #: registered too late: its frames were dropped unclaimed
    UNCLAIMED = "unclaimed"
    #: the sender's process is gone, and all that it had sent was read
    PEER_LOST = "peer_lost"
    #: the scheduler takes what is staged first
    CONSUMED = "consumed"
    #: the scheduler takes the end
    END_CONSUMED = "end_consumed"
    #: the scheduler takes while nothing is staged: it is given the failure
    FAILURE_CONSUMED = "failure_consumed"
    #: the runner cancels, or this stage's own sender failed or was stopped
    CANCELLED = "cancelled"
    #: as cancelled, while a get is in flight
    CANCELLED_IN_GET = "cancelled_in_get"
    #: the runner has had enough
    RELEASED = "released"
    #: as released, while a get is in flight
    RELEASED_IN_GET = "released_in_get"


class ReceiverBookkeeping(StrEnum):
    """What the receiver does to itself."""

    #: remember that the sender exists
    NOTE_OPEN = "note_open"
    #: a get is in flight
    BEGIN_GET = "begin_get"
    #: no get is in flight any more
    END_GET = "end_get"
    #: one attempt of the get is used up
    COUNT_ATTEMPT = "count_attempt"
    #: append the frame to what is staged
    STAGE_FRAME = "stage_frame"
    #: the next seq is expected
    ADVANCE_SEQ = "advance_seq"
    #: take the first staged frame and count it as taken
    TAKE_STAGED = "take_staged"
    #: drop what is staged and count it as taken
    DROP_STAGED = "drop_staged"


class ReceiverEffect(StrEnum):
    """What the runtime does for the receiver."""

    #: tell the host that the whole stage before knows the request
    REPORT_OPEN = "report_open"
    #: tell the sender its credit
    GRANT_CREDIT = "grant_credit"
    #: report the request as ready, once
    WAKE_SCHEDULER = "wake_scheduler"
    #: report the failure once, under the internal id; later frames need no credit
    RECORD_FAILURE = "record_failure"
    #: tell the host that the input is complete
    REPORT_END = "report_end"
    #: pass the cause to this stage's own sender of the request
    TELL_SENDER = "tell_sender"
    #: tell the sender that nothing more is wanted, with outcome, reason and time stamp
    STOP_SENDER = "stop_sender"
    #: forget the registration and leave a tombstone: later frames need no credit and are discarded
    RETIRE = "retire"


class KvTransferState(StrEnum):
    """States of the KV transfer."""

    #: known, as a parent or a companion, and no block is marked yet
    IDLE = "idle"
    #: its blocks are held; nobody touches them before the runner drains what is pending
    MARKED = "marked"
    #: the engine has it: blocks may be read or written at any moment
    ACTIVE = "active"
    #: every piece is acknowledged and the engine is done with the blocks; they are held until the outcome is drained
    COMPLETED = "completed"
    #: failed or cancelled, and known to be; the engine may still touch the blocks, so they are held
    FAILED = "failed"
    #: the blocks are given back: no transfer touches them any more
    RELEASED = "released"


class KvTransferEvent(StrEnum):
    """Events of the KV transfer: what happened."""

    #: the scheduler asks for the transfer of these blocks
    BLOCKS_MARKED = "blocks_marked"
    #: the runner drains what is pending: from now on the engine may touch the blocks
    BEGUN = "begun"
    #: as begun, where the plan has no piece for this rank and no companion is waited for
    BEGUN_WITHOUT_PIECES = "begun_without_pieces"
    #: the engine says that pieces are delivered and touched no more, or a companion is complete; others are open
    PIECE_ACKED = "piece_acked"
    #: as piece_acked, and no other is open
    LAST_PIECE_ACKED = "last_piece_acked"
    #: a piece is acknowledged that is not open
    PIECE_REPEATED = "piece_repeated"
    #: the engine, the other end or the runner says that it failed; the blocks may still be touched
    TRANSFER_FAILED = "transfer_failed"
    #: it took longer than it may
    DEADLINE_PASSED = "deadline_passed"
    #: a companion failed or was cancelled
    COMPANION_FAILED = "companion_failed"
    #: the owner of the request cancels, or the parent failed or was cancelled
    CANCELLED = "cancelled"
    #: the engine says that it touches the blocks no more, whatever became of them
    WENT_QUIET = "went_quiet"
    #: the scheduler collects the outcome
    OUTCOME_DRAINED = "outcome_drained"


class KvTransferBookkeeping(StrEnum):
    """What the KV transfer does to itself."""

    #: remember the blocks
    KEEP_BLOCKS = "keep_blocks"
    #: the pieces of the plan are open
    OPEN_PIECES = "open_pieces"
    #: these pieces are open no more
    CLOSE_PIECES = "close_pieces"
    #: companions are waited for no more
    DROP_COMPANIONS = "drop_companions"
    #: one more repeated acknowledgement was absorbed
    COUNT_REPEAT = "count_repeat"


class KvTransferEffect(StrEnum):
    """What the runtime does for the KV transfer."""

    #: hold the blocks: nobody may reuse them
    HOLD_BLOCKS = "hold_blocks"
    #: let go of the blocks, and report those that nobody else holds
    FREE_BLOCKS = "free_blocks"
    #: report the transfer as completed, once
    REPORT_COMPLETED = "report_completed"
    #: report the failure once: under its own identity, a companion's under its parent's alone
    RECORD_FAILURE = "record_failure"
    #: pass the outcome to the parent, if this is a companion
    TELL_PARENT = "tell_parent"
    #: cancel the companions: nobody needs them now
    CANCEL_COMPANIONS = "cancel_companions"
    #: tell the engine that nobody needs it; one that was given it stops, and answers by going quiet
    ABORT_ENGINE = "abort_engine"


class ConnectorState(StrEnum):
    """States of the connector."""

    #: the ends of the edges are there; nobody drives them
    CREATED = "created"
    #: threads of the stage's own drive them
    RUNNING = "running"
    #: they belong to somebody else, and the stage's caller drives them: there is no thread
    BORROWED = "borrowed"
    #: no request goes on; the threads put what is owed
    DRAINING = "draining"
    #: no request goes on; the caller drives what is owed
    RETURNING = "returning"
    #: a step raised: every request has failed and the edges are closed, so the peers know
    BROKEN = "broken"
    #: no thread runs; what the stage owned is closed, what it borrowed is the owner's
    CLOSED = "closed"


class ConnectorEvent(StrEnum):
    """Events of the connector: what happened."""

    #: the stage shall run, with threads
    STARTED = "started"
    #: the stage shall run without a thread, on ends that belong to somebody else
    LENT = "lent"
    #: the host, or a signal, shuts the stage down
    SHUTDOWN_BEGUN = "shutdown_begun"
    #: no request is left
    FLUSHED = "flushed"
    #: a request is left, and the time that it had is over
    GRACE_OVER = "grace_over"
    #: a step raised what it never should: a bug
    STEP_RAISED = "step_raised"


class ConnectorBookkeeping(StrEnum):
    """What the connector does to itself."""


class ConnectorEffect(StrEnum):
    """What the runtime does for the connector."""

    #: start the threads: one for each end, outbox, timers, producers
    START_THREADS = "start_threads"
    #: refuse new requests, and end each one
    END_REQUESTS = "end_requests"
    #: report each end that is not out as lost
    REPORT_UNSENT = "report_unsent"
    #: let every thread end, and wait for it a while
    STOP_THREADS = "stop_threads"
    #: close the ends of the edges
    CLOSE_ENDS = "close_ends"
    #: fail every request with what was raised
    FAIL_REQUESTS = "fail_requests"
