//! `lockctl`: the locks of a store on the command line. See `lock_runtime::guide::lockctl`.
//!
//! A program of your own is `lockctl` for databases with a scheme of your own:
//!
//! ```no_run
//! # use lock_runtime::store::{RecordStore, StoreError};
//! # fn open(_: &str, _: &str) -> Result<RecordStore, StoreError> { unreachable!() }
//! fn main() -> std::process::ExitCode {
//!     lockctl::run_with(|builder| builder.scheme("my-database", open))
//! }
//! ```
//!
//! `open` is that of [`LockClientBuilder::scheme`]. The completions and the manual of such a
//! program are those of `lockctl`.

#[cfg(not(unix))]
compile_error!("lockctl needs process groups and signals, which only Unix has");

mod args;
mod doctor;
mod inspect;
mod ls;
mod revoke;
mod run;
mod table;
mod warnings;

use std::{
    io::{self, Write as _},
    process::ExitCode,
    sync::Arc,
};

use clap::{CommandFactory as _, Parser as _};
use lock_runtime::{LockClient, LockClientBuilder, LockError, LockErrorKind};

use crate::args::{Args, Command, Store};

/// The exit statuses of lockctl itself, as in sysexits.h where it has one.
pub(crate) mod status {
    /// Done, and the answer is no: nothing was revoked, or the store is degraded.
    pub(crate) const NO: u8 = 1;
    /// An invalid command line.
    pub(crate) const USAGE: u8 = 2;
    /// The store does not answer.
    pub(crate) const UNAVAILABLE: u8 = 69;
    /// Any other error.
    pub(crate) const ERROR: u8 = 70;
    /// The lock is held by others.
    pub(crate) const BUSY: u8 = 75;
    /// The URL, the password, the rights, the server or the format of its data do not fit.
    pub(crate) const CONFIG: u8 = 78;
    /// The lock was lost while the command ran.
    pub(crate) const LOST: u8 = 76;
    /// The command cannot be executed, or was not found.
    pub(crate) const NOT_EXECUTABLE: u8 = 126;
    pub(crate) const NOT_FOUND: u8 = 127;
}

/// An error that ends lockctl, with its exit status.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: u8,
    pub(crate) code: String,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self {
            status: status::USAGE,
            code: "usage".into(),
            message: message.into(),
        }
    }

    /// Prints the error. A closed terminal is no reason to end otherwise.
    pub(crate) fn print(&self, as_json: bool) {
        let Self { code, message, .. } = self;
        let line = match as_json {
            true => serde_json::json!({ "code": code, "error": message }).to_string(),
            false => format!("lockctl: {}", lock_runtime::text::visible(message)),
        };
        let _ = writeln!(io::stderr(), "{line}");
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        use LockErrorKind as Kind;
        let status = match error.kind() {
            Kind::Contended | Kind::WaitTimeout | Kind::Overloaded | Kind::Blocked => status::BUSY,
            Kind::Lost(_) => status::LOST,
            Kind::Unavailable | Kind::ReadOnly | Kind::Full => status::UNAVAILABLE,
            Kind::InvalidKey | Kind::InvalidSpec => status::USAGE,
            Kind::InvalidUrl
            | Kind::Unauthenticated
            | Kind::Forbidden
            | Kind::WrongServer
            | Kind::IncompatibleFormat => status::CONFIG,
            _ => status::ERROR,
        };
        Self {
            status,
            code: error.code().into(),
            message: format!("{error:#}"),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self {
            status: match error.kind() {
                // As a program that SIGPIPE ends.
                io::ErrorKind::BrokenPipe => 141,
                _ => status::ERROR,
            },
            code: "io".into(),
            message: error.to_string(),
        }
    }
}

/// Executes the command line of the process. `configure` completes the settings of each client,
/// such as by [schemes](LockClientBuilder::scheme).
///
/// `lockctl run` starts the program once more, with arguments of its own: `main` does nothing else.
pub fn run_with(
    configure: impl Fn(LockClientBuilder) -> LockClientBuilder + Send + Sync + 'static,
) -> ExitCode {
    let mut args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refused(&error),
    };
    args.store.configure = args::Configure(Arc::new(configure));
    let as_json = args.store.json;
    warnings::print(as_json, matches!(args.command, Command::Keep(_)));
    // For rediss://, as every application has to.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let ended = runtime.map_err(Failure::from).and_then(|runtime| {
        let ended = runtime.block_on(execute(args));
        // A look-up of a host name may still be in progress, on a thread.
        runtime.shutdown_background();
        ended
    });
    ExitCode::from(ended.unwrap_or_else(|failure| {
        if failure.status != 141 {
            failure.print(as_json);
        }
        failure.status
    }))
}

/// Prints the refusal of a command line, or the help that was asked for.
fn refused(error: &clap::Error) -> ExitCode {
    let own = std::env::args_os().take_while(|argument| argument != "--");
    if error.use_stderr() && own.into_iter().any(|argument| argument == "--json") {
        let text = error.render().to_string();
        let text = text.trim().trim_start_matches("error: ");
        Failure::usage(text).print(true);
        return status::USAGE.into();
    }
    error.exit()
}

async fn execute(args: Args) -> Result<u8, Failure> {
    let Args { store, command } = args;
    match command {
        Command::Ls { prefix, state } => ls::print(&store, prefix, state).await,
        Command::Inspect { key, permits } => inspect::print(&store, &key, permits).await,
        Command::Revoke(revocation) => revoke::revoke(&store, revocation).await,
        Command::Forget { key } => revoke::forget(&store, &key).await,
        Command::Doctor { store: url } => doctor::report(&store, url).await,
        Command::Run(run) => run::run(&store, run).await,
        Command::Keep(lock) => run::keep(&store, lock).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "lockctl", &mut script);
            io::stdout().write_all(&script)?;
            Ok(0)
        }
        Command::Man { directory } => {
            match directory {
                Some(directory) => clap_mangen::generate_to(Args::command(), directory)?,
                None => clap_mangen::Man::new(Args::command()).render(&mut io::stdout())?,
            }
            Ok(0)
        }
    }
}

impl Store {
    /// The settings in the options and the environment, and the URL.
    pub(crate) fn settings(&self) -> Result<(LockClientBuilder, String), Failure> {
        let given = [("LOCK_URL", &self.url), ("LOCK_NAMESPACE", &self.namespace)];
        let given = given.into_iter().filter_map(|(name, value)| {
            let value = value.clone()?;
            Some((name, value))
        });
        let url = self.url.clone().map(Into::into);
        let url = url.or_else(|| std::env::var_os("LOCK_URL"));
        if url.is_none_or(|url| url.to_string_lossy().trim().is_empty()) {
            let message = "no store: give --url redis://127.0.0.1:6379/0, or set LOCK_URL";
            return Err(Failure::usage(message));
        }
        let (builder, url) = LockClientBuilder::from_env_with(given)?;
        let scheme = url.split(':').next().unwrap_or_default();
        if scheme.trim().eq_ignore_ascii_case("memory") {
            let message = "memory: is a new, empty store in this process; give the URL of the store that the services use";
            return Err(Failure::usage(message));
        }
        Ok(((self.configure.0)(builder), url))
    }

    /// Connects to the store.
    pub(crate) async fn connect(&self) -> Result<LockClient, Failure> {
        let (builder, url) = self.settings()?;
        Ok(builder.connect(&url).await?)
    }
}
