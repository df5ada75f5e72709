"""What a schedule costs on a machine: seconds, bytes, memory."""
