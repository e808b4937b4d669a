"""gloo on the CPU: parts go from rank to rank, through sockets or by reading memory."""
