/* Tensors against pages that may not be touched; loaded with LD_PRELOAD by tests/memcheck.py.
 *
 * torch takes the memory of tensors from posix_memalign.  While guarding, each such block has pages of its own:
 *
 *     | none | filler ... block | none |    guard(1): the block ends where memory ends
 *     | none | block ... filler | none |    guard(2): it begins there
 *
 * A load or a store one byte past the block, of any kernel, is a segmentation fault.  Freed blocks become untouchable
 * and no address is used twice.  What is written into the filler is found when the block is freed.  New memory is all
 * ones, which is NaN: an element read before it was written spoils the result.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, FILLER = 0xA5 };
#define ARENA ((size_t)1 << 40)

void *__libc_memalign(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *arena, *next;   /* reserved addresses; those from next on were never handed out */
static size_t *sizes;        /* by page of the arena: the size of the block that begins in it */
static int where;            /* 0 off, 1 blocks end at the untouchable page, 2 they begin after it */
static size_t live, made;

void guard(int on) { where = on; }
size_t guarded(void) { return made; }

static size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }
static int ours(const void *p) { return arena && (char *)p >= arena && (char *)p < arena + ARENA; }
static size_t *size_at(const void *p) { return &sizes[((char *)p - arena) / PAGE]; }

static void *reserve(size_t size) {
    void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return p;
}

static void *block(size_t size) {
    pthread_mutex_lock(&lock);
    if (!arena) {
        arena = reserve(ARENA);
        next = arena + PAGE;
        sizes = reserve(ARENA / PAGE * sizeof *sizes);
        mprotect(sizes, ARENA / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE);
    }
    char *begin = next, *p = NULL;
    size_t n = pages(size);
    /* each live block is a mapping, of which the kernel allows 65,530 */
    if (live < 30000 && begin + n + PAGE < arena + ARENA && !mprotect(begin, n, PROT_READ | PROT_WRITE)) {
        next += n + PAGE;
        live++, made++;
        memset(begin, FILLER, n);
        p = where == 1 ? begin + n - size : begin;
        memset(p, 0xFF, size);
        *size_at(p) = size;
    }
    pthread_mutex_unlock(&lock);
    return p;
}

static void check(const char *from, const char *to) {
    static const char text[] = "guard: memory beside a block was written\n";
    for (; from < to; from++)
        if ((unsigned char)*from != FILLER) {
            (void)!write(2, text, sizeof text - 1);
            abort();
        }
}

static void drop(char *p) {
    size_t size = *size_at(p), n = pages(size);
    char *begin = arena + (p - arena) / PAGE * PAGE;
    check(begin, p);
    check(p + size, begin + n);
    pthread_mutex_lock(&lock);
    mmap(begin, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    live--;
    pthread_mutex_unlock(&lock);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *p = where && size ? block(size) : NULL;
    *out = p ? p : __libc_memalign(alignment, size);
    return *out ? 0 : ENOMEM;
}

void free(void *p) {
    int before = errno;
    if (ours(p)) drop(p);
    else __libc_free(p);
    errno = before;
}

void *realloc(void *p, size_t size) {
    if (!ours(p)) return __libc_realloc(p, size);
    void *to = malloc(size);
    size_t held = *size_at(p);
    if (to) memcpy(to, p, held < size ? held : size), drop(p);
    return to;
}
