"""What people look at: reports of runs, searches and projects as pages with charts, the same figures as JSON."""
