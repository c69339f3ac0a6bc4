/* A switch between hosts on one machine: every host's link has a bandwidth and a latency.

   usage: tunswitch HOSTS MBIT_PER_S LATENCY_US

   Each host is a network namespace of its own, made here, with one TUN device: lab0, 10.77.0.1 and
   up. Prints "ready" and a file descriptor per host, through which /proc shows its namespace;
   forwards until its input is closed; then prints its processor seconds, how many packets were
   lost, and the bytes sent by each host. A line "MBIT_PER_S LATENCY_US" of its input changes all
   links for the packets that follow. Nothing outlives it: a namespace is gone with the last process
   that holds it.

   A packet leaves when its sender's link is free, arrives a latency later, and occupies the
   receiver's link as long as the sender's. Devices hand over up to 64 KB at once (TSO), so that a
   gigabit costs some thousand system calls a second, and nobody computes checksums. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_HOSTS = 64,
    MAX_READS = 32, /* from one host before the others have their turn */
    FRAME = sizeof(struct virtio_net_hdr),
    IP_HEADER = 20,
    TO = FRAME + 16, /* where the receiver's address begins */
};

typedef struct Packet {
    struct Packet *next;
    long long due_ns;
    int size;
    unsigned char data[];
} Packet;

typedef struct Host {
    int tun, space; /* the device, and the namespace it is in */
    Packet *first, *last;
    double out_free_ns, in_free_ns;
    long long sent_bytes;
} Host;

static Host hosts[MAX_HOSTS];
static int num_hosts;
static long long lost_packets;
static double bytes_per_ns, latency_ns;

static void must(int ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    exit(1);
}

static long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void set_flags(int control, const char *device)
{
    struct ifreq request = {.ifr_flags = IFF_UP | IFF_RUNNING};
    strcpy(request.ifr_name, device);
    must(!ioctl(control, SIOCSIFFLAGS, &request), "SIOCSIFFLAGS");
}

static void set_address(int control, unsigned long what, const char *address)
{
    struct ifreq request = {0};
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    strcpy(request.ifr_name, "lab0");
    in->sin_family = AF_INET;
    must(inet_pton(AF_INET, address, &in->sin_addr) == 1, "inet_pton");
    must(!ioctl(control, what, &request), "setting an address");
}

/* A new namespace with its device; this process is left inside. */
static void open_host(int number)
{
    Host *host = &hosts[number];
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    char address[32];
    must(!unshare(CLONE_NEWNET), "unshare");
    host->space = open("/proc/self/ns/net", O_RDONLY);
    host->tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    must(host->space >= 0 && host->tun >= 0, "/dev/net/tun");
    strcpy(request.ifr_name, "lab0");
    must(!ioctl(host->tun, TUNSETIFF, &request), "TUNSETIFF");
    must(!ioctl(host->tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4), "TUNSETOFFLOAD");
    int control = socket(AF_INET, SOCK_DGRAM, 0);
    must(control >= 0, "socket");
    snprintf(address, sizeof address, "10.77.0.%d", number + 1);
    set_address(control, SIOCSIFADDR, address);
    set_address(control, SIOCSIFNETMASK, "255.255.255.0");
    request.ifr_qlen = 5000; /* room for what a burst of TCP hands over at once */
    must(!ioctl(control, SIOCSIFTXQLEN, &request), "SIOCSIFTXQLEN");
    set_flags(control, "lab0");
    set_flags(control, "lo");
    close(control);
}

/* The host a packet is for; -1 if there is none. */
static int receiver(const unsigned char *data, int size)
{
    static const unsigned char net[] = {10, 77, 0};
    if (size < FRAME + IP_HEADER || data[FRAME] >> 4 != 4 || memcmp(data + TO, net, sizeof net))
        return -1;
    int number = data[TO + 3] - 1;
    return number >= 0 && number < num_hosts ? number : -1;
}

static void queue(Host *from, Host *to, const unsigned char *data, int size)
{
    double now = now_ns(), takes = (size - FRAME) / bytes_per_ns;
    double leaves = from->out_free_ns > now ? from->out_free_ns : now;
    double arrives = leaves + latency_ns;
    if (to->in_free_ns > arrives)
        arrives = to->in_free_ns;
    from->out_free_ns = leaves + takes;
    to->in_free_ns = arrives + takes;
    from->sent_bytes += size - FRAME;

    Packet *packet = malloc(sizeof *packet + size);
    must(packet != NULL, "malloc");
    *packet = (Packet){.due_ns = (long long)(arrives + takes), .size = size};
    memcpy(packet->data, data, size);
    if (to->last)
        to->last->next = packet;
    else
        to->first = packet;
    to->last = packet;
}

static void take_from(int number)
{
    static unsigned char data[1 << 17];
    for (int i = 0; i < MAX_READS; i++) {
        int size = read(hosts[number].tun, data, sizeof data);
        if (size < 0)
            return;
        int to = receiver(data, size);
        if (to >= 0 && to != number)
            queue(&hosts[number], &hosts[to], data, size);
    }
}

/* Hand over what is due; what a host refuses is lost, and its sender repeats it. */
static void deliver(Host *host)
{
    while (host->first && host->first->due_ns <= now_ns()) {
        Packet *packet = host->first;
        if (write(host->tun, packet->data, packet->size) < 0)
            lost_packets++;
        host->first = packet->next;
        if (!host->first)
            host->last = NULL;
        free(packet);
    }
}

/* How long nothing is to be delivered; NULL if nothing is under way. */
static struct timespec *pause_ns(struct timespec *pause)
{
    long long due = -1;
    for (int i = 0; i < num_hosts; i++)
        if (hosts[i].first && (due < 0 || hosts[i].first->due_ns < due))
            due = hosts[i].first->due_ns;
    if (due < 0)
        return NULL;
    long long left = due - now_ns();
    left = left > 0 ? left : 0;
    *pause = (struct timespec){.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    return pause;
}

static void set_link(const char *mbit_per_s, const char *latency_us)
{
    bytes_per_ns = atof(mbit_per_s) * 1e6 / 8 / 1e9;
    latency_ns = atof(latency_us) * 1e3;
}

/* Change the links as a line of the input says; 0 if the input is closed. */
static int told(void)
{
    char line[64], mbit_per_s[32], latency_us[32];
    int size = read(STDIN_FILENO, line, sizeof line - 1);
    if (size <= 0)
        return 0;
    line[size] = 0;
    if (sscanf(line, "%31s %31s", mbit_per_s, latency_us) == 2 && atof(mbit_per_s) > 0)
        set_link(mbit_per_s, latency_us);
    return 1;
}

/* Returns when the input is closed. */
static void forward(void)
{
    struct pollfd polls[MAX_HOSTS + 1];
    struct timespec pause;
    for (int i = 0; i < num_hosts; i++)
        polls[i] = (struct pollfd){.fd = hosts[i].tun, .events = POLLIN};
    polls[num_hosts] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    for (;;) {
        for (int i = 0; i < num_hosts; i++)
            deliver(&hosts[i]);
        if (ppoll(polls, num_hosts + 1, pause_ns(&pause), NULL) < 0)
            continue;
        if (polls[num_hosts].revents && !told())
            return;
        for (int i = 0; i < num_hosts; i++)
            if (polls[i].revents)
                take_from(i);
    }
}

int main(int count, char **words)
{
    if (count != 4 || (num_hosts = atoi(words[1])) < 2 || num_hosts > MAX_HOSTS) {
        fprintf(stderr, "usage: tunswitch HOSTS MBIT_PER_S LATENCY_US\n");
        return 2;
    }
    set_link(words[2], words[3]);
    for (int i = 0; i < num_hosts; i++)
        open_host(i);
    /* late packets would be counted as a slow network */
    struct sched_param first = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &first))
        setpriority(PRIO_PROCESS, 0, -10);
    printf("ready");
    for (int i = 0; i < num_hosts; i++)
        printf(" %d", hosts[i].space);
    printf("\n");
    fflush(stdout);
    forward();
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("%.3f %lld",
           used.ru_utime.tv_sec + used.ru_stime.tv_sec +
               (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6,
           lost_packets);
    for (int i = 0; i < num_hosts; i++)
        printf(" %lld", hosts[i].sent_bytes);
    printf("\n");
    return 0;
}
