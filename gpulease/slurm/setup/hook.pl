#!/usr/bin/perl -T
# The Prolog, Epilog and TaskProlog of Slurm for gpulease: asks the daemon of this node for the lease
# of a job, for its end, and for the environment of its tasks. Jobs without GPUs are left alone.
#
# `gpulease-setup slurm --install` installs it, and sets the socket. It loads no modules and starts
# no programs: that would take longer than all the rest, and it runs as root.

my $SOCKET = '/run/gpulease/gpuleased.sock';
# For the daemon, which may be restarting. srun gives up after MessageTimeout + BatchStartTimeout,
# which are 20 s by default.
my $WAIT_S = 15;
my $EPILOG_WAIT_S = 5;

my %hooks = (prolog_slurmd => \&prolog, epilog_slurmd => \&epilog, prolog_task => \&task_prolog);
my $context = $ENV{SLURM_SCRIPT_CONTEXT} // '';
my $hook = $hooks{$context} or die "gpulease: Slurm calls this as Prolog, Epilog or TaskProlog\n";
my ($job) = ($ENV{SLURM_JOB_ID} // '') =~ /^(\d+)$/ or die "gpulease: no SLURM_JOB_ID\n";
exit $hook->();

# As root, before the job. 0: Slurm continues. 1: Slurm drains the node, and queues the job again.
sub prolog {
    return 0 if ($ENV{SLURM_JOB_GPUS} // '') eq '';
    my %fields = (node => json($ENV{SLURMD_NODENAME}));
    for (qw(job_id job_uid job_gid job_restart_count)) {
        $fields{$_} = $1 if ($ENV{"SLURM_\U$_"} // '') =~ /^(\d+)$/;
    }
    my $body = join ',', map { qq("$_":$fields{$_}) } keys %fields;
    my ($status, $reply) = post('leases', "{$body}");
    # 409: refused. The daemon has queued the job again, or the task prolog tells its owner why.
    return 0 if $status == 201 || $status == 409;
    print STDERR "gpulease: job $job has no lease: $reply\n";
    return 1;
}

# As root, after the job. Never fails: the daemon finds a lease without a job.
sub epilog {
    return 0 if ($ENV{SLURM_JOB_GPUS} // '') eq '';
    my ($code) = ($ENV{SLURM_JOB_EXIT_CODE} // '') =~ /^(\d+)$/;
    my $body = defined $code ? qq({"job_exit_code":$code}) : '{}';
    my ($status, $reply) = post("leases/$job/end", $body, $EPILOG_WAIT_S);
    print STDERR "gpulease: $reply\n" if $status >= 300;
    return 0;
}

# As the user, before each task. Slurm reads `export NAME=value`, `unset NAME` and `print text`.
# 1: Slurm does not start the task.
sub task_prolog {
    my ($number, $step) = step();
    my $is_batch = defined $step ? $step eq 'batch' : !defined $ENV{SLURM_STEP_ID};
    # With --gpu-bind=none, Slurm 22.05 only counts the GPUs of several tasks.
    my $gpus = $is_batch ? $ENV{SLURM_JOB_GPUS} : $ENV{SLURM_STEP_GPUS} // $ENV{SLURM_GPUS_ON_NODE};
    $gpus //= '';
    return 0 if $gpus eq '';
    # A batch job that was submitted inside a step has its number of tasks, which share a lease.
    my $unset = $is_batch && defined delete $ENV{SLURM_STEP_TASKS_PER_NODE}
        ? "unset SLURM_STEP_TASKS_PER_NODE\n" : '';
    my $environment = join ',', map { json($_) . ':' . json($ENV{$_}) } keys %ENV;
    my $body = qq({"environment":{$environment},"devices":[) . join(',', devices()) . ']}';
    my ($status, $reply) = post("leases/$number/environment", $body);
    $reply = join '', map { "print gpulease: $_\n" } grep { /\S/ } split /\n/, $reply
        if $status != 200;
    syswrite STDOUT, $unset . $reply;
    return $status != 200;
}

# Returns the job of a task and the name of its step, from the slurmstepd that runs this. Variables
# say less: a batch job inherits those of the step that submits it, and SLURM_JOB_ID is that of the
# first component of a heterogeneous job.
sub step {
    open my $parent, '<', '/proc/' . getppid . '/cmdline' or return $job;
    my ($number, $step) = (<$parent> // '') =~ /^slurmstepd: \[(\d+)\.(\w+)\]/;
    return ($number // $job, $step);
}

# Returns the numbers of the device files that the task may open. Under device rules, Slurm numbers
# the GPUs of each task from 0, so that SLURM_STEP_GPUS does not say which they are.
sub devices {
    opendir my $folder, '/dev' or return;
    # `use filetest 'access'` without loading it. A test opens no GPU, which may take a second.
    BEGIN { $^H |= 0x00400000 }
    return grep { -R "/dev/nvidia$_" } map { /^nvidia(\d+)$/ } readdir $folder;
}

# One character for each byte, since environments need not be UTF-8.
sub json {
    my $text = $_[0] // '';
    $text =~ s/([^ !#-\[\]-~])/sprintf '\\u%04x', ord $1/ge;
    return qq("$text");
}

# Returns the status and the body of the daemon's answer; 0 and the reason if there is none in time.
sub post {
    my ($path, $body, $wait_s) = (@_, $WAIT_S);
    my $request = "POST /v1/slurm/$path HTTP/1.0\r\nHost: gpulease\r\n"
        . "Content-Type: application/json\r\nContent-Length: " . length($body) . "\r\n\r\n$body";
    my $why = 'it does not answer';
    local $SIG{PIPE} = 'IGNORE';
    local $SIG{ALRM} = sub { die "late\n" };
    my @answer = eval {
        alarm $wait_s;
        for (my $pause = 0.05 ;; $pause *= $pause < 1 ? 1.5 : 1) {
            my ($status, $reply) = try($request);
            # 429 and 503: too busy.
            return ($status, $reply) if $status && $status != 429 && $status != 503;
            $why = $reply;
            select undef, undef, undef, $pause;
        }
    };
    alarm 0;
    return @answer ? @answer : (0, "no answer from gpuleased in $wait_s s ($SOCKET): $why");
}

# Makes one attempt. Status 0 is no answer, or half of one, with the reason.
sub try {
    my ($request) = @_;
    socket my $daemon, 1, 1, 0 or return (0, "$!");
    connect $daemon, pack 'S a108', 1, $SOCKET or return (0, "$!");
    syswrite $daemon, $request;
    my $answer = '';
    while (sysread $daemon, $answer, 65536, length $answer) { }
    my ($head, $reply) = split /\r\n\r\n/, $answer, 2;
    my ($status) = ($head // '') =~ m{^HTTP/1\.\d (\d{3})};
    my ($length) = ($head // '') =~ /^content-length: *(\d+)/mi;
    return ($status, $reply) if $status && ($status == 204 || length $reply == ($length // -1));
    return (0, 'it closed the connection');
}
