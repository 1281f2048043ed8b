"""Messages between processes: requests, answers, lines and Unix sockets."""
