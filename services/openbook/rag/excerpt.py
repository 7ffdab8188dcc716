"""A passage in its document, from whoever keeps the passages."""

from openbook.core.context import Context, check_harmless
from openbook.core.passages import ids_around, in_document
from openbook.errors import SnapshotMismatch, UnknownPassage
from openbook.rag.answer import Excerpt
from openbook.rag.ports import PassageStore


async def excerpt(passages: PassageStore, passage_id: str, around: int, snapshot_id: str, context: Context) -> Excerpt:
    """A passage by its lasting id or its number, and at most `around` before it and behind it in its document; of the
    snapshot that is named, else of the current one.

    Raises:
        InvalidRequest: `around` is out of its range, or `snapshot_id` can be none.
        UnknownPassage: there is none such, or no such snapshot any more.
        ShardUnavailable, SnapshotMismatch, DeadlineExceeded: as `PassageStore.fetch`.
    """
    ids_around(0, around, 1)  # before anything is asked
    check_harmless("snapshot_id", snapshot_id)  # it stands in errors, and these in logs and headers
    try:
        found = await passages.locate(passage_id, snapshot_id, context)
        ids = ids_around(found.id, around, found.n_passages)
        several = await passages.fetch(ids, found.snapshot_id, context)
    except SnapshotMismatch as error:
        if not snapshot_id:
            raise
        raise UnknownPassage(str(error)) from None
    at = ids.index(found.id)
    before, after = in_document(several, at)
    return Excerpt(several[at], tuple(before), tuple(after), found.snapshot_id, context.request_id)
