"""Atomic writes of files and folders, and a strict reader of JSON."""

from headwise.files._atomic import STUDY_FILES as STUDY_FILES
from headwise.files._atomic import as_path as as_path
from headwise.files._atomic import check_writable as check_writable
from headwise.files._atomic import file_of_others as file_of_others
from headwise.files._atomic import files_beside as files_beside
from headwise.files._atomic import folder_beside as folder_beside
from headwise.files._atomic import make_folder as make_folder
from headwise.files._atomic import write_beside as write_beside
from headwise.files._json import JsonFile as JsonFile
from headwise.files._json import build_from as build_from
from headwise.files._json import decode as decode
from headwise.files._json import is_unicode as is_unicode
from headwise.files._json import kind_of as kind_of
from headwise.files._json import number as number
from headwise.files._json import parse_json as parse_json
from headwise.files._json import read_json as read_json
from headwise.files._json import read_object as read_object
from headwise.files._json import typed as typed
from headwise.files._json import without_nan as without_nan
from headwise.files._json import write_json as write_json
