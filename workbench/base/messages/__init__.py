"""Messages between processes: requests and answers, the lines that carry them, Unix sockets."""
