"""Pages and charts as trees of HTML and SVG, so that every text in them is escaped."""
