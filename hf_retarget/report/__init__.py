"""What people look at after a port: charts, and pages that need no network."""
