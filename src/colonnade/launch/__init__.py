"""From one command to ranks that run together: starting them, agreeing, watching who waits for whom, ending them."""
