"""Install packages on a pod: into a folder for a cluster, or into an environment for a job."""
