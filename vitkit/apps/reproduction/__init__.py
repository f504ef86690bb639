"""Published figures measured again, and records of them: what they were measured on, with checksums."""

from vitkit.apps.reproduction.measuring import reproduce, reproduce_all
from vitkit.apps.reproduction.records import Record, read_record

__all__ = ["Record", "read_record", "reproduce", "reproduce_all"]
