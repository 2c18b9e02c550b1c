/* Counts the calls that change files below a directory, and kills or fails at one.

   Preloaded into a Python process, it sees the calls of Python and of the C++ libraries
   that Orbax writes with. `fault_arm(directory, nth, error, last)`: the n-th call and
   those after it up to the `last` return an error, or kill the process if it is 0. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];
static atomic_long count;
static long first, last;
static int error_number, armed;

void fault_arm(const char *directory, long nth, int error, long until) {
    strncpy(below, directory, sizeof below - 1);
    atomic_store(&count, 0);
    first = nth, last = until, error_number = error, armed = 1;
}

/* Returns how many calls there were. */
long fault_disarm(void) {
    armed = 0;
    return atomic_load(&count);
}

/* Returns whether a call on a path, or on a descriptor, is to fail. */
static int fails(int directory, const char *path) {
    char link[64], whole[PATH_MAX];
    if (!armed) return 0;
    if (path == NULL || path[0] != '/') {
        if (directory < 0) return 0;
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t size = readlink(link, whole, sizeof whole - 1);
        if (size < 0) return 0;
        whole[size] = 0;
        path = whole;
    }
    if (strncmp(path, below, strlen(below)) != 0) return 0;
    long number = atomic_fetch_add(&count, 1) + 1;
    if (number < first || number > last) return 0;
    if (error_number == 0) kill(getpid(), SIGKILL);
    errno = error_number;
    return 1;
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define WRAP(type, name, given, passed, directory, path)                               \
    type name given {                                                                  \
        NEXT(name);                                                                    \
        return fails(directory, path) ? (type)-1 : next passed;                        \
    }

WRAP(int, rename, (const char *a, const char *b), (a, b), -1, a)
WRAP(int, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), d, a)
WRAP(int, mkdir, (const char *a, mode_t m), (a, m), -1, a)
WRAP(int, mkdirat, (int d, const char *a, mode_t m), (d, a, m), d, a)
WRAP(int, unlink, (const char *a), (a), -1, a)
WRAP(int, unlinkat, (int d, const char *a, int f), (d, a, f), d, a)
WRAP(int, rmdir, (const char *a), (a), -1, a)
WRAP(int, fsync, (int d), (d), d, NULL)
WRAP(int, fdatasync, (int d), (d), d, NULL)
WRAP(int, ftruncate, (int d, off_t n), (d, n), d, NULL)
WRAP(int, ftruncate64, (int d, off64_t n), (d, n), d, NULL)
WRAP(ssize_t, write, (int d, const void *b, size_t n), (d, b, n), d, NULL)
WRAP(ssize_t, pwrite, (int d, const void *b, size_t n, off_t o), (d, b, n, o), d, NULL)
WRAP(ssize_t, pwrite64, (int d, const void *b, size_t n, off64_t o), (d, b, n, o), d, NULL)
WRAP(ssize_t, writev, (int d, const struct iovec *v, int n), (d, v, n), d, NULL)

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))
#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...) {                                       \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;                      \
        va_end(more);                                                                  \
        NEXT(name);                                                                    \
        return WRITES(flags) && fails(-1, path) ? -1 : next(path, flags, mode);        \
    }
#define OPENAT(name)                                                                   \
    int name(int directory, const char *path, int flags, ...) {                        \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;                      \
        va_end(more);                                                                  \
        NEXT(name);                                                                    \
        int refused = WRITES(flags) && fails(directory, path);                         \
        return refused ? -1 : next(directory, path, flags, mode);                      \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
