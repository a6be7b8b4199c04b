/* Reports the calls of a process that write below a folder or use the network, before they happen and after they have
   succeeded, and lets some of them fail. Preloaded (LD_PRELOAD), so that it sees what compiled libraries do, too.
   `watch_calls` begins; the function it is given returns 0, or the error with which a call is to fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

typedef int (*Report)(int after, const char *call, const char *path);

static Report report;
static char folder[PATH_MAX];
static int network;
static __thread int inside; /* what the report does itself is not reported */

void watch_calls(const char *below, int with_network, Report given) {
    snprintf(folder, sizeof folder, "%s", below);
    network = with_network;
    report = given;
}

static int tell(int after, const char *call, const char *path) {
    int before = errno, error;
    if (!report || inside) return 0;
    inside = 1;
    error = report(after, call, path);
    inside = 0;
    errno = error ? error : before;
    return error;
}

/* The absolute path, or NULL if it is not below the folder. */
static const char *find(int directory, const char *path, char *place) {
    char link[64];
    ssize_t length = 0;
    if (!report || inside || !path) return NULL;
    if (*path != '/') {
        if (directory == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        if ((length = readlink(link, place, PATH_MAX - 1)) < 0) return NULL;
        place[length] = 0;
        if (*path) snprintf(place + length, PATH_MAX - length, "/%s", path);
    } else snprintf(place, PATH_MAX, "%s", path);
    return strncmp(place, folder, strlen(folder)) ? NULL : place;
}

static int is_network(int handle) {
    int domain = 0;
    socklen_t size = sizeof domain;
    return report && network && !inside && !getsockopt(handle, SOL_SOCKET, SO_DOMAIN, &domain, &size) &&
           (domain == AF_INET || domain == AF_INET6);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define AROUND(type, call, seen, failed, made)               \
    do {                                                     \
        const char *path_ = (seen);                          \
        type done_;                                          \
        if (path_ && tell(0, call, path_)) return failed;    \
        done_ = (made);                                      \
        if (path_ && done_ >= 0) tell(1, call, path_);       \
        return done_;                                        \
    } while (0)

#define OPENED(name, writes)                                                                                       \
    char place[PATH_MAX];                                                                                          \
    mode_t mode = 0;                                                                                               \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
    REAL(name);                                                                                                    \
    const char *seen = (writes) ? find(directory, path, place) : NULL

#define WRITES (flags & (O_WRONLY | O_RDWR | O_CREAT))
int open(const char *path, int flags, ...) {
    int directory = AT_FDCWD;
    OPENED(open, WRITES);
    AROUND(int, "open", seen, -1, real(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
    int directory = AT_FDCWD;
    OPENED(open64, WRITES);
    AROUND(int, "open", seen, -1, real(path, flags, mode));
}
int openat(int directory, const char *path, int flags, ...) {
    OPENED(openat, WRITES);
    AROUND(int, "open", seen, -1, real(directory, path, flags, mode));
}
int openat64(int directory, const char *path, int flags, ...) {
    OPENED(openat64, WRITES);
    AROUND(int, "open", seen, -1, real(directory, path, flags, mode));
}

#define ON_HANDLE(type, name, call, arguments, ...)                            \
    type name arguments {                                                      \
        char place[PATH_MAX];                                                  \
        REAL(name);                                                            \
        AROUND(type, call, find(handle, "", place), -1, real(__VA_ARGS__));    \
    }
ON_HANDLE(ssize_t, write, "write", (int handle, const void *data, size_t size), handle, data, size)
ON_HANDLE(ssize_t, writev, "write", (int handle, const struct iovec *parts, int count), handle, parts, count)
ON_HANDLE(ssize_t, pwrite64, "write", (int handle, const void *data, size_t size, off64_t at), handle, data, size, at)
ON_HANDLE(ssize_t, sendfile64, "write", (int handle, int from, off64_t *at, size_t size), handle, from, at, size)
ON_HANDLE(ssize_t, copy_file_range, "write",
          (int from, off64_t *at, int handle, off64_t *to, size_t size, unsigned flags), from, at, handle, to, size, flags)
ON_HANDLE(int, ftruncate64, "write", (int handle, off64_t size), handle, size)
ON_HANDLE(int, fsync, "fsync", (int handle), handle)
ON_HANDLE(int, fdatasync, "fsync", (int handle), handle)

#define ON_PATH(name, call, at, path, arguments, ...)                     \
    int name arguments {                                                  \
        char place[PATH_MAX];                                             \
        REAL(name);                                                       \
        AROUND(int, call, find(at, path, place), -1, real(__VA_ARGS__));  \
    }
ON_PATH(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(renameat, "rename", there, to, (int here, const char *from, int there, const char *to), here, from, there, to)
ON_PATH(link, "link", AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(linkat, "link", there, to, (int here, const char *from, int there, const char *to, int flags), here, from, there, to, flags)
ON_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(mkdirat, "mkdir", at, path, (int at, const char *path, mode_t mode), at, path, mode)
ON_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(rmdir, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(unlinkat, "unlink", at, path, (int at, const char *path, int flags), at, path, flags)
ON_PATH(chmod, "chmod", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(fchmodat, "chmod", at, path, (int at, const char *path, mode_t mode, int flags), at, path, mode, flags)

#define ON_SOCKET(type, name, call, arguments, ...)                                     \
    type name arguments {                                                               \
        REAL(name);                                                                     \
        AROUND(type, "network", is_network(handle) ? call : NULL, -1, real(__VA_ARGS__)); \
    }
ON_SOCKET(int, connect, "connect", (int handle, __CONST_SOCKADDR_ARG to, socklen_t size), handle, to, size)
ON_SOCKET(ssize_t, send, "send", (int handle, const void *data, size_t size, int flags), handle, data, size, flags)
ON_SOCKET(ssize_t, recv, "receive", (int handle, void *data, size_t size, int flags), handle, data, size, flags)
