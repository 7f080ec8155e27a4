"""What happens to one experiment: preparing it, driving its rounds, and the folder that a run leaves behind."""
