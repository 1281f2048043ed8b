"""Files that are replaced whole, the one reader of records, full disks, and folders that are their user's own."""

from workbench.base.files.records import (
    LARGEST,
    is_folder,
    is_there,
    load_json,
    not_ours,
    open_record,
    read_bytes,
    read_given,
    read_json,
    read_text,
    user_path,
    write_bytes,
    write_json,
    write_text,
)

__all__ = [
    "LARGEST", "is_folder", "is_there", "load_json", "not_ours", "open_record", "read_bytes", "read_given", "read_json",
    "read_text", "user_path", "write_bytes", "write_json", "write_text",
]  # fmt: skip
