/*
 * Files that say that a process is there: made where they are not, and locked until they are dropped or the
 * process ends. The lock is of the file (flock), so it holds between containers that share a folder.
 */
#ifndef SERVER_LOCK_FILE_H
#define SERVER_LOCK_FILE_H

/*
 * The descriptor that holds it, or -errno: -EWOULDBLOCK where another process has it, -EBUSY where somebody
 * keeps removing the file.
 */
int srv_lock_file_take(const char *path);
/* Removes the file and gives the lock back. fd -1: nothing. */
void srv_lock_file_drop(const char *path, int fd);

#endif
