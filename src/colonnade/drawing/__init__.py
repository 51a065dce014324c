"""Pages of pictures, written by hand: HTML, charts, bars. They fetch nothing. Pure, without torch."""
