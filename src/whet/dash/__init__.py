"""`whet dash`: a page that shows runs while they train. A thin JSON API over the other packages, and static files."""
