"""Which replica of a model is asked: of two at random the one with less to do, as Serve has it, but none in silence.

A replica says at once how much it has to do when it is asked, whatever it computes. One that does not is frozen, cut
off, or lost with its node, which Ray may not know for seconds; and what it never does looks like little to do.
"""

import asyncio
import random
import time

from ray.exceptions import ActorDiedError, RayError
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from openbook.core.deadline import Clock

SILENCE_S = 0.25
"""After a call that it has not said anything to; over gRPC it says something when it has done it."""
MOMENT_S = 0.05
"""For one that has been silent so long, to say something before another is chosen."""
ANSWER_S = 1.0
"""For one that is silent, to say how much it has to do; then it is asked again, and has twice as long."""
MOST_ANSWER_S = 30.0
"""It has at most: the question itself may be lost, and one that is back is passed by until it is asked again."""
AGAIN_S = 1.0
"""Until one is asked again that Ray could not reach."""


class AnsweringRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # of a library without types
    """In the processes that ask, one for each model."""

    def initialize_state(self, clock: Clock = time.monotonic) -> None:
        """By Serve, before all else."""
        self._clock = clock
        self._called_at: dict[ReplicaID, float] = {}  # the first call since it said anything
        self._asking: dict[ReplicaID, asyncio.Task[None]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Two of those that are not silent; of all, if all are."""
        if pending_request:
            pending_request.routing_context.should_backoff = True  # when both are full
        if len(candidate_replicas) > 1:
            await self._ask_the_silent(candidate_replicas)
        others = [each for each in candidate_replicas if not self._is_silent(each.replica_id)] or candidate_replicas
        return [random.sample(others, min(2, len(others)))]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """By Serve, when a call goes out."""
        super().on_send_request(replica_id)
        self._called_at.setdefault(replica_id, self._clock())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """By Serve, when a replica has said whether it takes a call."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._called_at.pop(replica_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """By Serve, when others are there."""
        super().update_replicas(replicas)
        for gone in self._called_at.keys() - {each.replica_id for each in replicas}:
            del self._called_at[gone]

    def _is_silent(self, replica_id: ReplicaID) -> bool:
        return self._clock() - self._called_at.get(replica_id, self._clock()) > SILENCE_S

    async def _ask_the_silent(self, replicas: list[RunningReplica]) -> None:
        """They have a moment to answer; later, whenever they do."""
        newly = [each for each in replicas if self._is_silent(each.replica_id) and each.replica_id not in self._asking]
        for each in newly:
            self._asking[each.replica_id] = asyncio.create_task(self._ask(each))
        if newly:
            await asyncio.wait([self._asking[each.replica_id] for each in newly], timeout=MOMENT_S)

    async def _ask(self, replica: RunningReplica) -> None:
        """Until it says something, or is gone."""
        patience_s, replica_id = ANSWER_S, replica.replica_id
        try:
            while replica_id in self._called_at and replica_id in self.curr_replicas:
                try:
                    async with asyncio.timeout(patience_s):
                        self.on_new_queue_len_info(replica_id, await replica.get_queue_len(deadline_s=patience_s))
                except ActorDiedError:
                    self.on_replica_actor_died(replica_id)
                except TimeoutError:
                    patience_s = min(2 * patience_s, MOST_ANSWER_S)
                except RayError:
                    await asyncio.sleep(AGAIN_S)
        finally:
            del self._asking[replica_id]
