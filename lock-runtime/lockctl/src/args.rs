//! The command line.

use std::{ffi::OsString, fmt, num::NonZeroU32, path::PathBuf, sync::Arc, time::Duration};

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use clap_complete::Shell;
use lock_runtime::{
    LockClientBuilder, LockSpec,
    operator::{HolderId, Inspection},
};

const ABOUT: &str = "\
Shows and revokes the locks of a store, and runs commands under a lock.

The store is that of the services: --url, or LOCK_URL in the environment, in any form that lock-runtime takes, such as \
redis://user:password@host:6379/0, redis+sentinel://.., redis+cluster://.. or redlock:redis://a,redis://b,redis://c. The other \
variables of LockClient::from_env apply as well, among them LOCK_NAMESPACE, LOCK_IDENTITY and LOCK_LONGEST_LEASE.";

const EXAMPLES: &str = "\
Examples:
  export LOCK_URL=redis://127.0.0.1:6379/0
  lockctl ls order:                     who holds which lock, and who waits
  lockctl inspect order:42              holders and waiters of one lock
  lockctl revoke order:42               asks, then takes it away from the holders shown
  lockctl forget report:2026-11-29      removes a result, so that the work runs again
  lockctl doctor                        the state of the store, and what to do about it
  lockctl run --key backup -- pg_dump shop -f shop.sql

Exit statuses:
  0    done                        70   another error
  1    nothing was revoked or      75   the lock is held by others
       forgotten; the store is     76   the lock was lost
       degraded
  2    invalid command line        78   the URL, the password, the rights
  69   the store does not answer        or the server do not fit
                                   126  the command cannot be executed
                                   127  the command was not found
`run` exits with the status of the command, or 128 + n if signal n ended it.";

#[derive(Debug, Parser)]
#[command(
    name = "lockctl",
    version,
    about = "Shows and revokes the locks of a store, and runs commands under a lock",
    long_about = ABOUT,
    after_help = EXAMPLES,
    arg_required_else_help = true
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) store: Store,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of all commands.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Store {
    /// The URL of the store; by default LOCK_URL. A URL with a password belongs in LOCK_URL, as
    /// other users can see command lines
    #[arg(long, global = true, value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) url: Option<String>,

    /// The prefix of all names in the store; by default LOCK_NAMESPACE, or `lock`
    #[arg(long, global = true, value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) namespace: Option<String>,

    /// Print JSON, an object on each line
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[arg(skip)]
    pub(crate) configure: Configure,
}

/// Completes the settings of clients, as the program that calls this one has said.
#[derive(Clone)]
pub(crate) struct Configure(
    pub(crate) Arc<dyn Fn(LockClientBuilder) -> LockClientBuilder + Send + Sync>,
);

impl Default for Configure {
    fn default() -> Self {
        Self(Arc::new(|builder| builder))
    }
}

impl fmt::Debug for Configure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Configure")
    }
}

/// The states of a lock. One with holders and waiters has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum State {
    /// It has a holder
    Held,
    /// It has been released, and `min_hold` keeps it
    Reserved,
    /// It keeps the result of work that is done once
    Done,
    /// Requests wait for it
    Waiting,
}

impl State {
    pub(crate) fn is_of(self, lock: &Inspection) -> bool {
        let mut holders = lock.holders.iter();
        match self {
            Self::Held => holders.any(|it| !it.is_reservation),
            Self::Reserved => holders.any(|it| it.is_reservation && !it.is_done),
            Self::Done => holders.any(|it| it.is_done),
            Self::Waiting => !lock.waiters.is_empty(),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the locks that are held, with their holders and waiters
    #[command(alias = "list")]
    Ls {
        /// Only locks whose names begin with this
        #[arg(default_value = "")]
        prefix: String,
        /// Only locks in this state
        #[arg(long, value_enum)]
        state: Option<State>,
    },
    /// Show the holders and the waiters of a lock
    Inspect {
        /// The name of the lock
        key: String,
        /// Show the permits of this name
        #[arg(long)]
        permits: bool,
    },
    /// Take a lock away from its holders
    #[command(long_about = REVOKE)]
    Revoke(Revocation),
    /// Remove the result of work that is done once, so that it runs again
    Forget {
        /// The name of the lock
        key: String,
    },
    /// Check the store and each of its servers, and name remedies
    Doctor {
        /// The store, in place of --url
        #[arg(value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
        store: Option<String>,
    },
    /// Run a command under a lock
    #[command(long_about = RUN)]
    Run(Run),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write one for each command to a directory
    Man {
        /// The directory
        #[arg(long = "dir", value_name = "DIR")]
        directory: Option<PathBuf>,
    },
    /// Hold the lock of `run`, in a process of its own.
    #[command(hide = true)]
    Keep(Lock),
}

const REVOKE: &str = "\
Takes a lock away from its holders and hands it to the next waiter. The former holders are notified, on PostgreSQL only if their process has a waiting \
request, and otherwise notice it at the next renewal, after a third of the lease. They may still be at work.

Without --holder and --all, the holders are shown, and exactly those are revoked after a `y`. A lock that has changed hands since \
then is left untouched.";

#[derive(Debug, ClapArgs)]
pub(crate) struct Revocation {
    /// The name of the lock
    #[arg(
        required_unless_present = "prefix",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) key: String,
    /// All locks and permits whose names begin with this. For development: it asks at the terminal,
    /// and shows the first ones
    #[arg(long, value_name = "PREFIX", value_parser = NonEmptyStringValueParser::new(), conflicts_with_all = ["key", "holder", "all", "permits"])]
    pub(crate) prefix: Option<String>,
    /// Only from this holder, if it still holds the lock; the identifier is that of `inspect`
    #[arg(long, value_name = "ID", value_parser = holder, conflicts_with = "all")]
    pub(crate) holder: Option<HolderId>,
    /// From all holders, those that acquire the lock at this moment included
    #[arg(long)]
    pub(crate) all: bool,
    /// Also if the lock has no expiry, with --all: such a key was not set by lock-runtime
    #[arg(long, requires = "all", conflicts_with = "permits")]
    pub(crate) endless: bool,
    /// The permits of this name
    #[arg(long)]
    pub(crate) permits: bool,
}

const RUN: &str = "\
Acquires a lock, runs the command, and releases the lock when the command has ended.

The command runs in a process group of its own, with LOCK_KEY and LOCK_FENCE (the fencing token of the grant) in its environment. \
The lease is renewed while it runs. When the lock is lost, its process group gets SIGTERM, and SIGKILL after the grace period. \
SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2 and SIGWINCH are forwarded to it. If lockctl is killed, the process group is killed \
as well, and the lock becomes free at the end of its lease.

The exit status is that of the command, or 128 + n if signal n ended it. It is 75 if the lock was not acquired in time, 76 if it \
was lost, 69 if the store did not answer, 126 or 127 if the command could not be started.";

#[derive(Debug, ClapArgs)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) lock: Lock,
    /// Exit with 0, without a word, if the lock is held by others: at once, or after --wait. For
    /// cron on several hosts
    #[arg(long, conflicts_with = "no_wait")]
    pub(crate) skip: bool,
    /// Pass LOCK_URL on to the command, with the password in it
    #[arg(long)]
    pub(crate) pass_url: bool,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// The lock of a command.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Lock {
    /// The name of the lock
    #[arg(long, value_name = "KEY", value_parser = key)]
    pub(crate) key: String,
    /// The time after which the lock becomes free if this machine fails; by default LOCK_LEASE, or
    /// 30s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) lease: Option<Duration>,
    /// The longest wait for the lock; by default LOCK_WAIT or LOCK_NO_WAIT, or 10s
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Give up at once if the lock is held
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Keep the lock for at least this long, so that a job that ends early does not run twice; by
    /// default LOCK_MIN_HOLD
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) min_hold: Option<Duration>,
    /// Lose the lock after this time, which ends the command; by default LOCK_MAX_HOLD
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    /// Share the lock with others that request it so
    #[arg(long, conflicts_with = "permits")]
    pub(crate) shared: bool,
    /// Take one of this number of permits
    #[arg(long, value_name = "N")]
    pub(crate) permits: Option<NonZeroU32>,
    /// Print nothing while it waits
    #[arg(long, hide = true)]
    pub(crate) quiet: bool,
    /// The time between SIGTERM and SIGKILL after a loss
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = grace)]
    pub(crate) grace: Duration,
}

impl Lock {
    pub(crate) fn spec(&self) -> LockSpec {
        let mut spec = match (self.shared, self.permits) {
            (true, _) => LockSpec::shared(),
            (false, Some(permits)) => LockSpec::permits(permits),
            (false, None) => LockSpec::exclusive(),
        };
        // Whatever LOCK_RENEW says to the service.
        spec = spec.renew();
        for (value, set) in [
            (self.lease, LockSpec::lease as fn(_, _) -> _),
            (self.wait, LockSpec::wait),
            (self.min_hold, LockSpec::min_hold),
            (self.max_hold, LockSpec::max_hold),
        ] {
            if let Some(value) = value {
                spec = set(spec, value);
            }
        }
        match self.no_wait {
            true => spec.no_wait(),
            false => spec,
        }
    }

    /// The options as arguments.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![format!("--key={}", self.key)];
        for (name, value) in [
            ("lease", self.lease),
            ("wait", self.wait),
            ("min-hold", self.min_hold),
            ("max-hold", self.max_hold),
            ("grace", Some(self.grace)),
        ] {
            let value = value.map(|value| format!("--{name}={}ns", value.as_nanos()));
            arguments.extend(value);
        }
        arguments.extend(self.no_wait.then(|| "--no-wait".into()));
        arguments.extend(self.quiet.then(|| "--quiet".into()));
        arguments.extend(self.shared.then(|| "--shared".into()));
        arguments.extend(self.permits.map(|permits| format!("--permits={permits}")));
        arguments
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write \"30s\", \"500ms\" or the like"))
}

fn grace(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
    let grace = duration(text)?;
    match grace <= LONGEST {
        true => Ok(grace),
        false => Err("it is longer than a day".into()),
    }
}

fn holder(text: &str) -> Result<HolderId, String> {
    text.parse()
        .map_err(|error: lock_runtime::LockError| error.to_string())
}

fn key(text: &str) -> Result<String, String> {
    match lock_runtime::LockKey::new(text) {
        Ok(_) => Ok(text.into()),
        Err(error) => Err(error.to_string()),
    }
}
