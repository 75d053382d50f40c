"""What holds for every test."""

import signal

# started in the background, a shell hands down an ignored Ctrl-C; the tests press it
signal.signal(signal.SIGINT, signal.default_int_handler)
