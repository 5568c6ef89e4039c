//! The programs of PostgreSQL, the user that they run as, and data directories.

use std::{
    env, fs,
    io::{self, Write},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::Mutex,
};

use rustix::process::geteuid;

use crate::supervised::Supervised;

/// The PostgreSQL of this machine.
#[derive(Clone, Debug)]
pub(super) struct Installation {
    programs: PathBuf,
    owner: Option<Owner>,
}

/// The user of the servers where this process is root's, because PostgreSQL refuses to run as root.
#[derive(Clone, Copy, Debug)]
struct Owner {
    user: u32,
    group: u32,
}

impl Installation {
    /// The programs that `pg_config` names, those in the PATH, or those of the latest Debian
    /// package.
    pub(super) fn find() -> io::Result<Self> {
        let path = env::var_os("PATH").unwrap_or_default();
        let places = pg_config().into_iter().chain(env::split_paths(&path));
        let has_programs = |place: &PathBuf| {
            let mut programs = ["postgres", "initdb"].iter();
            programs.all(|program| place.join(program).is_file())
        };
        let programs = places.chain(of_debian()).find(has_programs);
        let missing = "PostgreSQL is missing; `tests/run.sh --stores` installs it";
        let owner = if geteuid().is_root() {
            Some(Owner::find()?)
        } else {
            None
        };
        Ok(Self {
            programs: programs.ok_or_else(|| io::Error::other(missing))?,
            owner,
        })
    }

    /// A temporary directory with the data of a new server, which is removed at the end.
    pub(super) fn new_data(&self) -> io::Result<Supervised> {
        /// Copied for each server, since its creation takes ten times as long.
        static TEMPLATE: Mutex<Option<Supervised>> = Mutex::new(None);
        let mut template = TEMPLATE.lock().expect("a test has panicked in here");
        let template = match &mut *template {
            Some(template) => template,
            none => none.insert(self.initialize()?),
        };
        let directory = self.new_directory()?;
        let mut copy = self.command("cp", directory.directory());
        copy.arg("-a")
            .arg(self.data_of(template.directory()))
            .arg(".");
        succeed(copy.output()?)?;
        Ok(directory)
    }

    /// The same with the data of a server that runs, for its standby.
    pub(super) fn new_copy(&self, port: u16) -> io::Result<Supervised> {
        let directory = self.new_directory()?;
        let program = self.programs.join("pg_basebackup");
        let mut copy = self.command(program, directory.directory());
        copy.args([
            "--pgdata=data",
            "--write-recovery-conf",
            "--checkpoint=fast",
        ]);
        copy.args(["--wal-method=stream", "--no-sync", "--dbname"]);
        copy.arg(format!(
            "host=127.0.0.1 port={port} user=postgres application_name=standby"
        ));
        succeed(copy.output()?)?;
        Ok(directory)
    }

    /// Writes a file that only the user of the servers can read.
    pub(super) fn write(&self, file: &Path, content: &str) -> io::Result<()> {
        fs::write(file, content)?;
        fs::set_permissions(file, fs::Permissions::from_mode(0o600))?;
        match self.owner {
            Some(Owner { user, group }) => chown(file, Some(user), Some(group)),
            None => Ok(()),
        }
    }

    /// The data in a directory of [`new_data`](Self::new_data).
    pub(super) fn data_of(&self, directory: &Path) -> PathBuf {
        directory.join("data")
    }

    fn initialize(&self) -> io::Result<Supervised> {
        let directory = self.new_directory()?;
        let mut initdb = self.command(self.programs.join("initdb"), directory.directory());
        initdb.args(["--pgdata=data", "--username=postgres", "--auth=trust"]);
        initdb.args([
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        ]);
        succeed(initdb.output()?)?;
        Ok(directory)
    }

    /// An empty directory of the user of the servers.
    pub(super) fn new_directory(&self) -> io::Result<Supervised> {
        let directory = tempfile::Builder::new()
            .prefix("lock-tests-postgres-")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()?;
        if let Some(Owner { user, group }) = self.owner {
            chown(directory.path(), Some(user), Some(group))?;
        }
        // A process that does nothing: its supervisor removes the directory.
        let held = Supervised::spawn(directory.path(), ["sleep", "infinity"])?;
        let _ = directory.keep();
        Ok(held)
    }

    /// The command line of a server.
    pub(super) fn server(&self, data: &Path, port: u16) -> Vec<String> {
        let mut words = self.as_owner(data);
        words.push(self.programs.join("postgres").display().to_string());
        words.extend(["-D".to_owned(), data.display().to_string()]);
        words.extend(["-p".to_owned(), port.to_string()]);
        words
    }

    /// The beginning of a command line of the user of the servers.
    pub(super) fn as_owner(&self, directory: &Path) -> Vec<String> {
        let mut words = Vec::new();
        // PostgreSQL does not start in a directory that its user may not enter.
        words.extend(["env".to_owned(), format!("--chdir={}", directory.display())]);
        if let Some(Owner { user, group }) = self.owner {
            words.extend(["setpriv".to_owned(), "--clear-groups".to_owned()]);
            words.extend([format!("--reuid={user}"), format!("--regid={group}")]);
        }
        words
    }

    /// Executes a statement without a server.
    pub(super) fn execute(&self, data: &Path, statement: &str) -> io::Result<()> {
        let mut command = self.command(self.programs.join("postgres"), data);
        command.args(["--single", "-D", ".", "postgres"]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = command.spawn()?;
        if let Some(mut input) = process.stdin.take() {
            writeln!(input, "{statement}")?;
        }
        let output = process.wait_with_output()?;
        // It succeeds whether its statements do or not.
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if log.contains("ERROR:") {
            return Err(io::Error::other(log));
        }
        succeed(output)
    }

    /// Lets the system remove the segment of shared memory by which servers notice others on their
    /// data. It would outlive a server that is killed, and the system has 4,096.
    pub(super) fn forget_shared_memory(&self, data: &Path) -> io::Result<()> {
        let file = fs::read_to_string(data.join("postmaster.pid"))?;
        let line = file.lines().nth(6).unwrap_or_default();
        let Some(segment) = line.split_whitespace().nth(1) else {
            return Err(io::Error::other(format!(
                "no segment in postmaster.pid: {file}"
            )));
        };
        succeed(Command::new("ipcrm").args(["-m", segment]).output()?)
    }

    /// Limits the size of files, as the user of the server: root may lack the right to.
    pub(super) fn limit_files(&self, backend: i32, bytes: Option<u64>) -> io::Result<()> {
        let limit = bytes.map_or("unlimited".to_owned(), |bytes| bytes.to_string());
        let mut command = self.command("prlimit", Path::new("/"));
        command.args([
            format!("--pid={backend}"),
            format!("--fsize={limit}:unlimited"),
        ]);
        succeed(command.output()?)
    }

    /// A command of the user of the servers.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>, directory: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(directory).stdin(Stdio::null());
        if let Some(Owner { user, group }) = self.owner {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Owner {
    /// The user that packages of PostgreSQL create.
    fn find() -> io::Result<Self> {
        let number = |which| {
            let output = Command::new("id").args([which, "postgres"]).output()?;
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            let missing = "root cannot run PostgreSQL, and there is no user `postgres`";
            text.parse().map_err(|_| io::Error::other(missing))
        };
        Ok(Self {
            user: number("-u")?,
            group: number("-g")?,
        })
    }
}

fn pg_config() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().into())
}

/// Where Debian installs the versions, the latest first.
fn of_debian() -> Vec<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let version = |name: &str| name.parse::<u32>().ok();
    let mut versions: Vec<_> = versions
        .filter_map(|entry| version(entry.ok()?.file_name().to_str()?))
        .collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    let place = |version| format!("/usr/lib/postgresql/{version}/bin").into();
    versions.into_iter().map(place).collect()
}

fn succeed(output: Output) -> io::Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    Err(io::Error::other(
        String::from_utf8_lossy(&text).into_owned(),
    ))
}
