"""Checks of uploads to an object storage; what only the storage can tell is asked when a run starts."""

from collections.abc import Iterator

from colonnade.config.schema import Config


def storage_named_by_url(config: Config) -> Iterator[str]:
    url = config.checkpoint.upload_to
    if url is not None and "://" not in url:
        yield (
            f"checkpoint.upload_to = {url!r} is no URL: it names a folder of an object storage, like "
            "s3://bucket/runs/books. For a folder of this machine write file:// and its absolute path."
        )
    elif url is not None and not url.partition("://")[2].partition("?")[0].strip("/"):
        yield (
            f"checkpoint.upload_to = {url!r} names no folder behind ://, as where a variable was empty. Name one of "
            "the run's own, like s3://bucket/runs/books or file:///mnt/runs/books."
        )
    if url is not None and "::" in url:
        yield (
            f"checkpoint.upload_to = {url!r} chains several kinds of storage (::), which checkpoints are not written "
            "through. Name the last one alone."
        )


def kept_where_uploaded(config: Config) -> Iterator[str]:
    kept = config.checkpoint
    if kept.upload_keep is not None and kept.upload_to is None:
        yield (
            f"checkpoint.upload_keep = {kept.upload_keep} has no effect: checkpoint.upload_to is not set. Set it, or "
            "leave upload_keep out."
        )


UPLOAD_CHECKS = (
    (("checkpoint.upload_to",), storage_named_by_url),
    (("checkpoint.upload_to", "checkpoint.upload_keep"), kept_where_uploaded),
)
