/*
 * Version and commit as strings. The build defines SRV_VERSION, and SRV_HAVE_VERSION_GIT where it could write
 * server/version_git.h; a build outside of it (a single file by hand) still says something true.
 */
#include "server/control.h"

#ifdef SRV_HAVE_VERSION_GIT
#include "server/version_git.h"
#else
#define SRV_COMMIT "unknown"
#endif

#ifndef SRV_VERSION
#define SRV_VERSION "unversioned"
#endif

const char srv_version[] = SRV_VERSION;
const char srv_commit[] = SRV_COMMIT;
