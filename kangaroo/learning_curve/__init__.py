"""What more text would bring: adapters that have read more and less of it, side by side."""
