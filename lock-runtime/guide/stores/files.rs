use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Error, ErrorKind, Write as _},
    ops::Bound,
    path::{Path, PathBuf},
};

use lock_runtime::store::{
    Replied, StoreError, StoreErrorKind,
    records::{
        ReadReply, Record, RecordName, Records, Swap, SwapReply, Swapped, Timestamp, Version,
    },
};
use rustix::{
    fs::{FlockOperation, flock},
    io::retry_on_intr,
};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

/// Locks for the processes of one machine, in a directory that they share.
///
/// All records are in one file, `records.json`. A swap replaces the file, so it is written as a
/// whole or not at all.
#[derive(Clone, Debug)]
pub struct FileRecords {
    directory: PathBuf,
}

/// The content of the file: the records by name.
type Table = BTreeMap<String, Kept>;

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u64,
    needed_until: u64,
    body: Vec<u8>,
}

impl Kept {
    fn record(&self) -> Result<Record, Error> {
        let version = Version::from_number(self.version)
            .ok_or_else(|| Error::new(ErrorKind::InvalidData, "a record without a version"))?;
        Ok(Record::new(version, self.body.clone()))
    }
}

impl FileRecords {
    /// Keeps the records in an existing directory on a local disk.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// Runs `job` while no other process or thread runs one. It goes on when the future is dropped.
    fn alone<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Path) -> Result<T, Error> + Send + 'static,
    ) -> Replied<'static, T> {
        let directory = self.directory.clone();
        Box::pin(async move {
            let shown = directory.display().to_string();
            let done = spawn_blocking(move || {
                let lock = File::options()
                    .create(true)
                    .append(true)
                    .open(directory.join("lock"))?;
                // Ends when the file is closed, also by the end of the process.
                retry_on_intr(|| flock(&lock, FlockOperation::LockExclusive))?;
                job(&directory)
            });
            let done = done.await.unwrap_or_else(|error| Err(Error::other(error)));
            done.map_err(|error| StoreError::new(kind_of(&error), format!("{shown}: {error}")))
        })
    }
}

fn kind_of(error: &Error) -> StoreErrorKind {
    match error.kind() {
        ErrorKind::PermissionDenied => StoreErrorKind::Forbidden,
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof => StoreErrorKind::ForeignKey,
        _ => StoreErrorKind::Unavailable,
    }
}

fn load(directory: &Path) -> Result<Table, Error> {
    // A process may have been killed between its rename and its fsync.
    File::open(directory)?.sync_all()?;
    match fs::read(directory.join("records.json")) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Table::new()),
        Err(error) => Err(error),
    }
}

fn save(directory: &Path, table: &Table) -> Result<(), Error> {
    let new = directory.join("records.new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(table)?)?;
    file.sync_all()?;
    fs::rename(new, directory.join("records.json"))?;
    File::open(directory)?.sync_all()
}

fn find(table: &Table, name: &RecordName) -> Result<Option<Record>, Error> {
    table.get(name.as_str()).map(Kept::record).transpose()
}

impl Records for FileRecords {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        let swap = swap.clone();
        self.alone(move |directory| {
            let mut table = load(directory)?;
            let now = Timestamp::of_system();
            if now < swap.not_before {
                return Ok(SwapReply::new(now, Swapped::Early));
            }
            let present = swap.changes.iter().map(|it| find(&table, &it.name));
            let present: Vec<_> = present.collect::<Result<_, _>>()?;
            let versions = present.iter().map(|it| it.as_ref().map(|it| it.version));
            if !versions.eq(swap.changes.iter().map(|it| it.known)) {
                return Ok(SwapReply::new(now, Swapped::Conflict(present)));
            }
            table.retain(|_, kept| now.micros() <= kept.needed_until);
            for change in swap.changes {
                let kept = Kept {
                    version: change.record.version.number(),
                    needed_until: change.needed_until.micros(),
                    body: change.record.body,
                };
                table.insert(change.name.to_string(), kept);
            }
            save(directory, &table)?;
            Ok(SwapReply::new(now, Swapped::Done))
        })
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        let names = names.to_vec();
        self.alone(move |directory| {
            let table = load(directory)?;
            let records = names.iter().map(|name| find(&table, name));
            let records = records.collect::<Result<_, _>>()?;
            Ok(ReadReply::new(Timestamp::of_system(), records))
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a RecordName>,
    ) -> Replied<'a, Vec<(RecordName, Record)>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.alone(move |directory| {
            let table = load(directory)?;
            let from = match &after {
                Some(name) => Bound::Excluded(name.as_str()),
                None => Bound::Unbounded,
            };
            let records = table.range::<str, _>((from, Bound::Unbounded));
            let records = records.filter(|(name, _)| name.starts_with(&prefix));
            let records = records.take(20);
            records
                .map(|(name, kept)| Ok((RecordName::new(name.as_str()), kept.record()?)))
                .collect()
        })
    }
}
